"""A Hugging Face hub of one model, read-only: where the sites of `bench join-command` find the model's files.

`python -m tests.bench.join.hub FOLDER HOST PORT` serves the files of FOLDER as the repository NAME. It speaks
the four requests that `snapshot_download` makes; the model is made here, too.
"""

import hashlib
import json
import shutil
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME = "bench/policy"
REVISION = "0" * 40
CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1472,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""With the tiny model's vocabulary: 30.6 million parameters."""


def make_model(folder: Path, seed: int = 0, **changes: int) -> int:
    """Write a Qwen3 with random weights in bf16 and the tiny model's tokenizer there; the number of its parameters."""
    import torch
    from transformers import AutoModelForCausalLM

    from composer_prime.config.recipe import TINY
    from composer_prime.sites.embedded.model import tiny_models

    torch.manual_seed(seed)
    tiny = tiny_models(TINY).BUILT_IN[TINY]
    config = tiny.config()
    config.update(CONFIG | changes | {"layer_types": None})
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return sum(values.numel() for values in model.parameters())


class Hub(BaseHTTPRequestHandler):
    """Answers for the files in `folder`."""

    protocol_version = "HTTP/1.1"
    folder: Path

    def do_GET(self) -> None:
        """A listing, or a file."""
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{NAME}/tree/"):
            self._say([_listed(file) for file in sorted(self.folder.iterdir())])
        elif path.startswith(f"/api/models/{NAME}"):
            self._say({"id": NAME, "sha": REVISION, "siblings": [{"rfilename": f.name} for f in self.folder.iterdir()]})
        else:
            self._send_file(path, with_body=True)

    def do_HEAD(self) -> None:
        """What a file is."""
        self._send_file(self.path.partition("?")[0], with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def _say(self, said: object) -> None:
        data = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_file(self, path: str, *, with_body: bool) -> None:
        file = self.folder / path.rpartition("/")[2]
        if not path.startswith(f"/{NAME}/resolve/") or not file.is_file():
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("ETag", f'"{_listed(file)["oid"]}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("Content-Length", str(file.stat().st_size))
        self.end_headers()
        if with_body:
            with file.open("rb") as content:
                shutil.copyfileobj(content, self.wfile)


def _listed(file: Path) -> dict[str, object]:
    name = hashlib.sha1(file.name.encode()).hexdigest()
    return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": name}


if __name__ == "__main__":
    Hub.folder = Path(sys.argv[1])
    ThreadingHTTPServer((sys.argv[2], int(sys.argv[3])), Hub).serve_forever()
