"""Where the processes of a recipe's sites will listen, and who can reach them."""

from collections.abc import Iterator

from composer_prime.config.prime_rl import PrimeRecipe
from composer_prime.config.recipe import Recipe, RecipeBase
from composer_prime.sites.embedded.ports import HOST
from composer_prime.sites.prime_rl.placement import PORTS_PER_SITE


def listening_lines(recipe: RecipeBase) -> Iterator[str]:
    """One line for each process of a site that listens."""
    if isinstance(recipe, PrimeRecipe):
        yield from _prime_rl(recipe)
    elif isinstance(recipe, Recipe):
        port = recipe.inference.server.port
        place = "a free port" if port is None else f"port {port}, one more for each site after the first"
        yield f"listens: inference on {HOST}, {place}: programs that have the site's token"
        if recipe.inference.engine == "vllm":
            yield "listens: vLLM on a Unix socket in a folder of its own: this user"
        yield f"listens: verifiers' proxy in the orchestrator on {HOST}, a free port: who has a rollout's own secret"


def _prime_rl(recipe: PrimeRecipe) -> Iterator[str]:
    from composer_prime.sites.prime_rl.toml import is_one_node

    local = is_one_node(recipe)
    everywhere = "0.0.0.0: whoever reaches the nodes, without a token"
    reach = f"{HOST}: every user of that machine, without a token" if local else everywhere
    shared = recipe.sites.count > 1 and recipe.upstream.get("slurm") is None
    if recipe.upstream_value("inference") is not None:
        host = recipe.upstream_value("inference.server.host")
        port = recipe.prime_rl.first_port if shared else recipe.upstream_value("inference.server.port", 8000)
        behind = "" if recipe.upstream_value("inference.router") == "None" else f", and {port + 100} behind it"
        later = f", {PORTS_PER_SITE} more for each site after the first" if shared else ""
        at = reach if host is None else f"{host}, as the recipe says: without a token"
        yield f"listens: PRIME-RL's inference, port {port}{behind}{later}, on {at}"
    if recipe.upstream_value("trainer.metrics_server") is not None:
        host, port = (recipe.upstream_value(f"trainer.metrics_server.{name}") for name in ("host", "port"))
        yield f"listens: PRIME-RL's metrics, port {port or 8000}, on {reach if host is None else host}"
    yield f"listens: PRIME-RL's weights, rollouts and environments between its processes, on {reach}"
    yield "listens: torch's rendezvous, free ports, on all addresses: whoever reaches the machine, without a token"
