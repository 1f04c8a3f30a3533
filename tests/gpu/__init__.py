"""`make test-gpu`. The same checks run on a CPU in tests/component/engine/test_gpu_checks.py."""
