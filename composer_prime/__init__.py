"""composer-prime: post-train any Hugging Face model with RL on agentic tasks, across sites that share only a bucket."""

__version__ = "0.1.0"
