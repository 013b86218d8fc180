"""Other agents' sessions as ATIF, by Harbor's converters, which run in an environment of their own.

Harbor needs Python 3.12 and pins libraries that ours can't have beside it.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from composer_prime.errors import BadInput

AGENTS: Mapping[str, str] = {
    "gemini-cli": "gemini-cli.trajectory.jsonl",
    "copilot-cli": "copilot-cli.jsonl",
    "pi": "pi/sessions/session.jsonl",
    "hermes": "hermes-session.jsonl",
    "goose": "goose.txt",
    "kimi-cli": "kimi-cli.txt",
    "cursor-cli": "cursor-cli.txt",
}
"""Agents by Harbor's name, each with the file below a trial's logs that its converter reads."""
_CONVERT = """
import sys, pathlib
from harbor.agents.factory import AgentFactory
from harbor.models.agent.context import AgentContext
from harbor.models.agent.name import AgentName
agent = AgentFactory.get_agent_class(AgentName(sys.argv[1]))
agent(logs_dir=pathlib.Path(sys.argv[2]), model_name="unknown/unknown").populate_context_post_run(AgentContext())
"""


def to_atif(path: Path, harbor_python: Path, agent: str) -> bytes:
    """An agent's session as Harbor reads it: the bytes of one ATIF trajectory.

    harbor_python  the interpreter of an environment that has harbor
    agent          one of AGENTS

    Raises BadInput for another agent, or where Harbor can't be run or makes nothing of the file.
    """
    if agent not in AGENTS:
        raise BadInput(f"agent {agent!r} isn't one that Harbor converts: give one of {', '.join(AGENTS)}")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, AGENTS[agent])
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
        command = [harbor_python, "-c", _CONVERT, agent, folder]
        without_network = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=without_network)
        except OSError as error:
            raise BadInput(
                f"--harbor ({harbor_python}) can't be run ({error.strerror}): make it by `python3.12 -m venv hb` and "
                "`hb/bin/pip install harbor`, and give hb/bin/python"
            ) from None
        found = Path(folder, "trajectory.json")
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["it said nothing"]
            raise BadInput(f"--harbor ({harbor_python}) ended with {done.returncode}: {said[-1]}")
        if not found.is_file():
            raise BadInput(f"Harbor makes no trajectory of {path}: give a session of {agent}, or name its agent")
        return found.read_bytes()
