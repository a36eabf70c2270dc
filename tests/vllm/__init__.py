"""A real vLLM on the CPU, real trainers, real kills: `make test-vllm`, in an environment that has vLLM."""
