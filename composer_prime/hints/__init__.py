"""Hint distillation: from a tool's error in a rollout to the context under which the policy is its own teacher.

Pure but for writer.py, which asks a model for hints: others score what is put together here.
"""
