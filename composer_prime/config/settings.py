"""One site's settings: the recipe, plus what is decided when the site starts (seed, shard, port, model folder).

They are written once as JSON, and every process of the site gets just that site's folder.
"""

import zlib
from pathlib import Path

from pydantic import Field

from composer_prime.config.paths import RunPaths, SitePaths, run_uri
from composer_prime.config.recipe import Recipe, RecipeBase
from composer_prime.config.table import SiteName, Table

WITHOUT_WEIGHTS = "WITHOUT_WEIGHTS"
"""A file that marks a model folder of configuration and tokenizer alone: the weights are the run's masters."""


class SiteSettings(Table):
    """What the processes of one site read."""

    recipe: Recipe
    """The recipe, its paths absolute."""

    site: SiteName
    """This site's name."""

    site_names: tuple[SiteName, ...]
    """The sites that the local run started with; a site that joins by hand isn't among them."""

    data_shard: int = Field(ge=0)
    """Which shard of every taskset this site trains on, from 0."""

    num_shards: int = Field(ge=1)
    """How many shards there are, as this site counts: a joiner counts itself in, so its shard overlaps the others'."""

    sampling_seed: int = Field(ge=0, lt=2**32)
    """Seed of this site's task order and token sampling."""

    inference_port: int = Field(ge=1, le=65535)
    """Loopback port of this site's inference server."""

    model_dir: Path
    """Local folder of the initial weights and the tokenizer: policy version 0. See `has_weights`."""

    run_uri: str | None
    """The run's root in the bucket; None without an outer loop."""

    resume: bool = False
    """Continue from the newest local checkpoint."""

    @property
    def paths(self) -> SitePaths:
        """This site's folder."""
        return RunPaths.of(self.recipe).site(self.site)

    @property
    def has_weights(self) -> bool:
        """Whether the model's folder holds weights; if not, only a run that is there can be joined."""
        return not (self.model_dir / WITHOUT_WEIGHTS).exists()

    def save(self) -> Path:
        """Write the settings into the site's folder, which is returned."""
        self.paths.settings.parent.mkdir(parents=True, exist_ok=True)
        self.paths.settings.write_text(self.model_dump_json(indent=2) + "\n")
        return self.paths.root

    @classmethod
    def load(cls, site_dir: Path | str) -> "SiteSettings":
        """The settings that `save` wrote into that folder."""
        return cls.model_validate_json(SitePaths(Path(site_dir)).settings.read_text())


def data_shard(recipe: Recipe, site: str) -> int:
    """The site's shard: as overridden, else its position among the run's sites; a joiner takes the next one.

    A site named by a single letter counts as that letter's position, so that joiners c and d differ.
    """
    override = recipe.sites.overrides.get(site)
    if override is not None and override.data_shard is not None:
        return override.data_shard
    if site in recipe.site_names:
        return recipe.site_names.index(site)
    position = ord(site) - ord("a") if len(site) == 1 and site.isalpha() else 0
    return max(recipe.sites.count, position)


def sampling_seed(recipe: RecipeBase, site: str) -> int:
    """The site's seed: as overridden, else drawn from run.seed and the site's name, the same on every machine."""
    override = recipe.sites.overrides.get(site)
    if override is not None and override.sampling_seed is not None:
        return override.sampling_seed
    return zlib.crc32(f"{recipe.run.seed}/{site}".encode())


def _anchored(recipe: Recipe) -> Recipe:
    """The recipe with its paths absolute. Not resolved: an environment's python is a link that must stay one."""
    python = recipe.inference.python
    inference = recipe.inference.model_copy(update={"python": python and python.absolute()})
    key_file = recipe.site.key_file
    site = recipe.site.model_copy(update={"key_file": key_file and key_file.absolute()})
    return recipe.model_copy(
        update={
            "output_dir": recipe.output_dir.absolute(),
            "inference": inference,
            "site": site,
            "replay": recipe.replay.anchored(),
        }
    )


def settle_site(recipe: Recipe, site: str, *, inference_port: int, model_dir: Path, resume: bool) -> SiteSettings:
    """The settings of one site: its shard and seed from the recipe, the rest as its starter decided.

    Raises pydantic's ValidationError when `site` isn't a site name (the CLI checks it first).
    """
    recipe = _anchored(recipe)
    shard = data_shard(recipe, site)
    listed = [data_shard(recipe, name) for name in recipe.site_names]
    return SiteSettings(
        recipe=recipe,
        site=site,
        site_names=recipe.site_names,
        data_shard=shard,
        num_shards=max(shard, *listed) + 1,
        sampling_seed=sampling_seed(recipe, site),
        inference_port=inference_port,
        model_dir=model_dir.absolute(),
        run_uri=run_uri(recipe),
        resume=resume,
    )
