"""Tiny policies for trying a taskset on a CPU: made from demonstrations of a scripted player that the taskset brings.

`python -m tiny_policy TASKSET --out DIR` makes one. The modules, in the order in which they are used: player (what a
taskset's `play` may return), playing (demonstrations through the real tools), pieces (their tokenizer), rendering
(their token ids), packing and training (the policy), making (the recipe). All makers share qwen3 (the fresh model) and
descent (a training step); built_in has the models that composer-prime knows by name.
"""
