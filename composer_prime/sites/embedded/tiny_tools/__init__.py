"""Models that use tools, `tiny-tools` and the larger `small-tools`: their tokenizer, and what they saw before RL."""
