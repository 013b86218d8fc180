"""How far one thing travels through the package: distinct functions, files, and changes of file, all threads together.

    python -m tests.trips round          one site alone, from the due step to the adopted weights (int8, memory store)
    python -m tests.trips recipe FILE    a recipe, from `composer-prime run` to the first child process

Run in the repository's root, in its environment. Functions are counted by file and qualified name, nested ones and
lambdas too; module and class bodies are not. The names below are those of November 2026: change them with the code.
"""

import os
import sys
import tempfile
import threading
from collections import defaultdict

import composer_prime

ROOT = os.path.dirname(composer_prime.__file__) + os.sep


class Done(BaseException):
    """The trip is over."""


class Recorder:
    """Notes each call of a function of the package, by thread, while `on`."""

    def __init__(self, is_end=lambda file, name: False) -> None:
        self.on, self.is_end, self.visits = False, is_end, defaultdict(list)

    def __call__(self, frame, event, _) -> None:
        code = frame.f_code
        if event != "call" or not self.on or not code.co_filename.startswith(ROOT) or not code.co_flags & 2:
            return
        file, name = code.co_filename.removeprefix(ROOT), code.co_qualname
        self.visits[threading.current_thread().name].append((file, name))
        if self.is_end(file, name):
            raise Done

    def report(self, what: str) -> None:
        functions = {one for visits in self.visits.values() for one in visits}
        changes = sum(
            sum(a[0] != b[0] for a, b in zip([("", ""), *visits], visits, strict=False))
            for visits in self.visits.values()
        )
        files = {file for file, _ in functions}
        print(f"{what}: {len(functions)} functions, {len(files)} files, {changes} changes of file")


def trip_round() -> None:
    import torch

    from composer_prime.store import open_store
    from composer_prime.sync.site_clock import OuterLoop
    from tests.sync.harness import make_net, make_terms

    torch.set_num_threads(1)
    terms = make_terms(codec="int8", sync_delay=0, rounds=6, inner_steps=4, fragments=2, quorum=1)
    net = make_net()
    outer = OuterLoop(open_store("memory://trips"), terms, run="trips", site="a")
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    outer.join(net.named_parameters())

    def step():
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)
        return outer.after_inner_step(100, 4)

    for _ in range(7):
        step()
    recorder.on = True
    step()
    recorder.on = False
    sys.setprofile(None)
    threading.setprofile(None)
    outer.close()
    recorder.report("round")


def trip_recipe(recipe: str) -> None:
    from composer_prime.cli.main import main

    recorder = Recorder(lambda file, name: file.endswith("supervisor.py") and name.endswith("SiteSupervisor._start"))
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["composer-prime", "run", recipe, "--output_dir", folder, "--clean"]
        recorder.on = True
        sys.setprofile(recorder)
        try:
            main()
        except Done:
            pass
        finally:
            sys.setprofile(None)
    recorder.report("recipe to the first child process")


if __name__ == "__main__":
    trip_round() if sys.argv[1:2] == ["round"] else trip_recipe(sys.argv[2])
