"""The tiny model that uses tools, `model.name = "tiny-tools"`: its tokenizer, and what it has seen before RL."""
