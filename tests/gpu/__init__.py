"""`make test-gpu`. The same checks run on a CPU in tests/component/test_gpu_checks.py."""
