"""Hint distillation: from a tool's error in a rollout to the context under which the policy is its own teacher.

Pure: what is found and put together here is scored by whoever holds the policy's server.
"""
