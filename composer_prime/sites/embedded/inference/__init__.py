"""A site's inference server: `python -m composer_prime.sites.embedded.inference <site_dir>`.

wire (bodies) <- app (routes) -> engine (the contract) <- transformers_engine or vllm_engine. It speaks what verifiers'
train client and PRIME-RL's orchestrator ask of vLLM, and says on each answer which policy version sampled it.
"""
