"""Invitations as a hostile owner writes and signs them: every key and field, with values that are wrong or do harm.

Seeded: a case is drawn from its number alone.
"""

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from composer_prime.config.messages import known_names
from composer_prime.config.prime_rl import OWNED, PORTS, UPSTREAM_TABLES, PrimeRecipe
from composer_prime.config.recipe import Recipe
from composer_prime.volunteers.invitation import CREDENTIALS
from composer_prime.volunteers.shared_recipe import EMBEDDED, LOSSES, PRIME_RL, RENDERERS

PUBLIC_URLS = ("https://teacher.example.org", "http://8.8.8.8:8000/v1", "https://a.b-c.example.com:8443/x")
PRIVATE_URLS = (
    "http://localhost:8000", "http://127.0.0.1", "http://127.1", "http://2130706433", "http://0x7f000001",
    "http://0177.0.0.1", "http://0x7f.0x0.0x0.0x1", "http://0", "http://0.0.0.0:1", "http://[::1]:80",
    "http://[::ffff:127.0.0.1]", "http://[fe80::1]", "http://[fc00::1]", "http://169.254.169.254/latest",
    "http://10.0.0.1",
    "http://172.16.0.1", "http://192.168.1.1", "http://100.64.0.1", "http://router", "http://printer.local",
    "http://metadata.google.internal", "http://x.localhost", "http://user@8.8.8.8", "http://8.8.8.8@127.0.0.1",
    "http://8.8.8.8\\@127.0.0.1", "http://8.8.8.8#@127.0.0.1", "http://8.8.8.8?@127.0.0.1",
    "http://\uff11\uff12\uff17.0.0.1",
    "http://127\u30020\u30020\u30021", "http://localhost.", "http://127.0.0.1.", "http://8.8.8.8:99999",
    "http://8.8.8.8:x",
    "http://224.0.0.1", "http://255.255.255.255", "http://[::]", "http://[64:ff9b::7f00:1]", "http://[2002:7f00:1::]",
    "http:///x", "http://", "https://a b.example.com", "https://evil.example\r\nHost: x", "HTTP://LOCALHOST",
    "http://1.2.3",
)  # fmt: skip
TEXTS = (
    "", " ", "None", "null", "true", "/etc/passwd", "../../.ssh/id_rsa", "~/.ssh/id_ed25519", "./x", "..", ".", "/",
    "~",
    "Documents", "secret", "a/b/c", "a//b", "a/../b", "C:\\Windows\\win.ini", "\\\\host\\share", "file:///etc/passwd",
    "x\ny", "x\r", "x\x00y", "\x1b[2Jhidden", "\u202egnp.exe", "\u2028", "\ud7ff", "caf\u00e9", "\uff54iny", "x" * 5000,
    "$(touch marker)", "`touch marker`", "; touch marker", "| touch marker", "-x", "--help", "%s%n",
    "{error.__class__}",
    "{error:999999999}", "{error!r}", "{0}", "{", "}", "{{error}}", "pydoc.pipepager", "os.system", "subprocess.call",
    "builtins.exec", "composer_prime.losses.composer.composer_loss.__globals__", "composer_prime.losses.composer.terms",
    "antigravity", "this", "pdb", "os", "sys", "pip", "torch", "numpy", "pytest", "verifiers", "tests",
    "composer_prime", "composer_prime.sites.prime_rl.outer.loss", "os.system", "ipo.py", "ipo ", "IPO", "my.loss",
    "custom", "ref_kl", "sft", "s3://elsewhere/run",
    "reverse_letters", "reverse-letters/x", "reverse-letters@1", "reverse.letters", "Reverse-Letters", "a.b", "x;y",
    "x y",
    "sort-letters", "bash", "codex", "claude_code", "custom", "kimi-k2.5", "nemotron-3", "default", "org/model.git",
    "org/",
    "/org", "org/.hidden", "https://hub.example/org/model", "AWS_SECRET_ACCESS_KEY", "LD_PRELOAD", "sh -c evil",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 3, 8, 16, 64, 512, 2**31, 2**32, 2**53, 2**63, -(2**63), 2**64, 10**40, 0.0, -0.0, 0.5, 0.999, 1.0,
    1.5,
    1e-300, 1e9, 1e308, -1e308, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
MILD = (
    *(1, 2, 4, 8, 16, 64, 512, 0.1, 0.5, 0.9, 1.0, True, False), *LOSSES, *RENDERERS, "tiny", "org/model",
    "bench/policy",
    "reverse-letters", "chat", "null", "subprocess", "embedded", "prime-rl", "steps", "seconds", "fp32", "int8",
    "tokens",
    "mean", "a", "hermes", "filesystem", "0.8.0", "transformers", "grpo",
    "adamw", "custom", "ipo", "cispo", "composer_loss", "composer_prime.sites.prime_rl.outer.loss", "auto",
    "single_node", "train", "run", "try {error} with {tool}",
    *PUBLIC_URLS,
)  # fmt: skip
SCHEMA = sorted({*known_names(Recipe), *known_names(PrimeRecipe), *UPSTREAM_TABLES, *OWNED, *PORTS})
DANGEROUS = (
    "env_vars.LD_PRELOAD", "trainer.env_vars.PATH", "orchestrator.env_vars.PYTHONPATH", "inference.env_vars.X",
    "outer.hook", "outer.import_path", "hook", "hooks.start", "plugins", "resume", "dry_run", "wandb.project",
    "log.level",
    "log.file", "monitors.wandb.project", "monitors.file.path", "slurm.pre_run_command", "launch.secrets",
    "launch.caches.x", "launch.image", "inference.server.port", "inference.python", "inference.host",
    "inference.command",
    "inference.vllm.trust_remote_code", "inference.vllm.chat_template", "inference.vllm_extra.host", "model.path",
    "model.revision", "model.trust_remote_code", "model.code", "model.tokenizer", "tokenizer.name",
    "tokenizer.trust_remote_code", "trainer.loss.function", "trainer.loss.kwargs.cmd", "trainer.loss.kwargs.title",
    "trainer.loss.kwargs.inner.path", "trainer.loss.kwargs.outer", "trainer.loss.kwargs.site",
    "trainer.loss.kwargs.import_path", "trainer.loss.inner",
    "trainer.model.import_path", "trainer.ckpt.output_dir", "trainer.data.fake", "trainer.profile_path",
    "orchestrator.renderer.import_path", "orchestrator.client.base_url", "orchestrator.model.client.base_url",
    "orchestrator.model.trust_remote_code", "orchestrator.env[].id", "orchestrator.eval.source[].name",
    "orchestrator.judge.base_url", "orchestrator.buffer.load_path", "orchestrator.advantage.import_path",
    "orchestrator.train.source[].import_path", "orchestrator.train.source[].env.id",
    "orchestrator.train.source[].env.path",
    "orchestrator.train.source[].env.args.data_dir", "orchestrator.train.source[].env.taskset.system_prompt",
    "orchestrator.train.source[].env.taskset.task", "orchestrator.train.source[].env.taskset.data_dir",
    "orchestrator.train.source[].env.taskset.trust_remote_code", "orchestrator.train.source[].env.taskset.base_url",
    "orchestrator.train.source[].env.taskset.split", "orchestrator.train.source[].env.taskset.dataset_name",
    "orchestrator.train.source[].env.taskset.num_examples", "orchestrator.train.source[].env.taskset.api_key_var",
    "orchestrator.train.source[].env.agent.harness.env", "orchestrator.train.source[].env.agent.harness.skills",
    "orchestrator.train.source[].env.agent.harness.forward_env", "orchestrator.train.source[].env.agent.runtime.image",
    "orchestrator.train.source[].env.agent.runtime.command", "orchestrator.train.source[].serve.address",
    "replay.teachers[].api_key_var", "replay.teachers[].headers", "replay.import_path", "hints.path",
    "hints.api_key_var", "hints.writer.base_url",
    "hints.templates.other",
    "prime_rl.command", "prime_rl.first_port", "weight_broadcast.start_command", "weight_broadcast.host", "sites.count",
    "ckpt.output_dir", "ckpt.resume_step",
)  # fmt: skip
UNKNOWN = "(a key of no name)"
KEYS = sorted({*EMBEDDED, *PRIME_RL, *SCHEMA, *DANGEROUS, UNKNOWN})
"""Of recipes: all that are allowed, all that the schemas know, and more."""
TABLES = [key for key in KEYS if any(other.startswith((f"{key}.", f"{key}[]")) for other in KEYS)]
SETTINGS = [key for key in KEYS if key not in TABLES]
ROTATION = [*KEYS, *7 * TABLES]
"""Each in turn; tables oftener, since they don't stand beside settings in them."""
FIELDS = (
    "run", "site", "owner", "uri", "number", "public", "seed", "guest", "expires_at", "manifest_sha256", "recipe",
    "version", "signature", "new", *(f"environment.{name}" for name in CREDENTIALS), "environment.new",
)  # fmt: skip
URIS = (
    "s3://bucket/run", "s3://bucket/x/run", "gs://bucket/run", "hf://buckets/org/bucket/run", "s3://bucket/../run",
    "s3://arn:aws:s3:x/run", "gateway+https://gate.example.org/run", "gateway+http://8.8.8.8:8790/run", "run",
    "/tmp/run",
    "../run", "~/run", "file:///etc/run", "file://../run", "memory://other/run", "http://8.8.8.8/run", "ftp://x/run",
    "s3://bucket/run\n/run", "gateway+ftp://x.example/run", "ssh://x/run", "s3:///run", "s3://b/x?y=/run",
    "x" * 3000 + "/run",
    "gateway+https://gate.example.org/other", "s3://bucket/other", *(f"gateway+{url}/run" for url in PRIVATE_URLS),
)  # fmt: skip
EMBEDDED_ONLY, PRIME_ONLY = EMBEDDED.keys() - PRIME_RL.keys(), PRIME_RL.keys() - EMBEDDED.keys()


@dataclass(frozen=True)
class Case:
    """One invitation. keys: of the recipe, or one field, that were changed; `recipe` None: the field is."""

    number: int
    keys: tuple[str, ...]
    recipe: dict[str, Any] | None
    fields: Mapping[str, Any]


def draw(number: int, embedded: dict[str, Any], prime: dict[str, Any]) -> Case:
    """The case of that number. embedded, prime: the data of sound recipes."""
    rng = random.Random(number)
    if number % 4 == 3:
        field = FIELDS[number // 4 % len(FIELDS)]
        return Case(number, (field,), None, {field: field_value(rng, field)})
    # Each in turn, so that none comes seldom; one of them alone in a fifth of all cases.
    keys = [ROTATION[(number - number // 4) % len(ROTATION)]] + ([] if rng.random() < 0.2 else rng.sample(SETTINGS, 24))
    is_prime = keys[0] in PRIME_ONLY or (keys[0] not in EMBEDDED_ONLY and rng.random() < 0.4)
    other = EMBEDDED_ONLY if is_prime else PRIME_ONLY
    keys = [key for key in dict.fromkeys(keys) if key not in other]
    data = copy.deepcopy(prime if is_prime else embedded)
    is_mild = (keys[0] in EMBEDDED or keys[0] in PRIME_RL) and rng.random() < 0.6
    if is_mild:
        keys = [key for key in keys if key in EMBEDDED or key in PRIME_RL][:4]
    put_in = {key: value(rng, key, is_mild) for key in keys}
    for key in reversed(keys):  # the first comes last, so that it stands
        put(data, rng, key, put_in[key])
    stands = [key for key in keys if key == UNKNOWN or get(data, key) is put_in[key]]
    return Case(number, tuple(stands), data, {})


def get(data: Any, key: str) -> Any:
    """What stands at a key, in the first entry of lists; later keys may have taken its table away."""
    for part in key.split("."):
        if not isinstance(data, dict) or part.removesuffix("[]") not in data:
            return None
        data = data[part.removesuffix("[]")]
        if part.endswith("[]") and part != key.rpartition(".")[2]:
            if not isinstance(data, list) or not data:
                return None
            data = data[0]
    return data


def value(rng: random.Random, key: str, is_mild: bool) -> Any:
    """What is put at a key: something that may be right, or something that isn't."""
    if is_mild:
        rule = EMBEDDED.get(key) or PRIME_RL.get(key)
        return rng.choice([each for each in (*MILD, *NUMBERS) if rule is None or rule.admits(each)] or MILD)
    kind = rng.random()
    if kind < 0.45:
        return rng.choice((*TEXTS, *PRIVATE_URLS, *PUBLIC_URLS))
    if kind < 0.6:
        return rng.choice(NUMBERS)
    if kind < 0.7:
        codes = [rng.choice((rng.randrange(32, 127), rng.randrange(0xD7FF))) for _ in range(rng.randrange(40))]
        return "".join(map(chr, codes))
    if kind < 0.8:
        return rng.choice((True, False))
    inner = rng.choice((*TEXTS, *NUMBERS))
    return rng.choice(([], [inner], {}, {"x": inner}, {"cmd": "touch marker"}, [{"x": inner}], [[inner]], [{}] * 40))


def put(data: dict[str, Any], rng: random.Random, key: str, value: Any) -> None:
    """Set a key, tables and entries of lists made on the way, where nothing hostile stands there already."""
    if key == UNKNOWN:
        name = rng.choice((*TEXTS[:60], "trainer.loss", "orchestrator.train", "a[]", "__class__", "x" * 100)) or "empty"
        tables = [data, *(table for table in data.values() if isinstance(table, dict))]
        rng.choice(tables)[name] = value
        return
    *path, last = key.split(".")
    table: Any = data
    for part in path:
        name = part.removesuffix("[]")
        inner = table.setdefault(name, [{}] if part.endswith("[]") else {})
        if part.endswith("[]"):
            if not isinstance(inner, list) or not inner:
                table[name] = inner = [{}]
            inner = inner[0]
        if not isinstance(inner, dict):
            table[name] = inner = {}
            if part.endswith("[]"):
                table[name] = [inner]
        if name == "teachers":
            inner.setdefault("name", "t")
            inner.setdefault("base_url", PUBLIC_URLS[0])
        table = inner
    table[last.removesuffix("[]")] = value


def field_value(rng: random.Random, field: str) -> Any:
    """What is put into a field of the invitation itself."""
    if field == "uri":
        return rng.choice(URIS)
    if field.endswith(("ENDPOINT_URL", "ENDPOINT_URL_S3")):
        return rng.choice((*PRIVATE_URLS, *PUBLIC_URLS, *TEXTS))
    if field == "recipe":
        return rng.choice((*TEXTS, "a = " + "[" * 20000, "a = " + "9" * 5000, "x" * 2**17, "a." * 3000 + "b = 1"))
    finite = [number for number in NUMBERS if abs(number) < 1e300]
    return rng.choice((*TEXTS, *PRIVATE_URLS, "eu-central-1", *finite, None, [], {}, True))


def leaves(data: Any, name: str = "") -> list[tuple[str, Any]]:
    """(dotted name, value) of all that stands in a recipe's data, entries of lists under the list's name."""
    if isinstance(data, dict):
        return [leaf for key, inner in data.items() for leaf in leaves(inner, f"{name}.{key}" if name else key)]
    if isinstance(data, list):
        return [leaf for inner in data for leaf in leaves(inner, name)]
    return [(name, data)]
