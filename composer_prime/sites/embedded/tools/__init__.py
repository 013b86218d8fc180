"""The tools of rollouts that play inside our process: what an environment's toolsets and MCP servers answer.

in_process runs verifiers' Toolset classes in a thread a rollout, external speaks to MCP servers over the network,
stage puts both together for one conversation, and hides toolsets from verifiers.
"""
