"""Where files are kept that are published whole: named checkpoints and exports."""
