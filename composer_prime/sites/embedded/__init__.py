"""The embedded site: PRIME-RL's three processes and contracts in small, on a CPU, under a supervisor of ours.

Each role is a program: `python -m composer_prime.sites.embedded.<role> SITE_DIR`, for inference, orchestrator, trainer;
the supervisor starts them by start.py, which is quicker.
"""
