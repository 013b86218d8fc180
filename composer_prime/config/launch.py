"""`[launch]`: the machines that `composer-prime launch` asks a platform for. It changes nothing that is learned.

Options of the command win over it. Secrets stand here by name alone: values come from the launcher's environment.
"""

import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from composer_prime.config.table import Table


def _check_variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(
            f"launch.secrets ({name!r}) must be names of environment variables, such as HF_TOKEN: "
            "export the value where you launch, and write its name here"
        )
    return name


class LaunchConfig(Table):
    """`[launch]`: one site's machine, for every site alike."""

    gpu: str | None = None
    """A GPU as the platform names it: "H100" on Modal, where "H100,A100-80GB" takes either, "h200" on HF Jobs. None:
    no GPU."""

    gpu_count: int | None = Field(default=None, ge=1, le=16)
    """GPUs of a site, when `gpu` is set; None: as many as `[deployment]` asks for, else 1."""

    cpus: float | None = Field(default=None, gt=0)
    """CPU cores; None: the platform's default."""

    memory_gib: float | None = Field(default=None, gt=0)
    """GiB of memory; None: the platform's default."""

    disk_gib: float | None = Field(default=None, gt=0)
    """GiB of disk; None: the platform's default."""

    image: str | None = None
    """Container image that has composer-prime; None: the platform's default."""

    registry_secret: str | None = Field(default=None, min_length=1)
    """Modal's secret with REGISTRY_USERNAME and REGISTRY_PASSWORD, for an image in a private registry."""

    timeout_hours: float = Field(default=24.0, gt=0, le=24 * 14)
    """Hours after which the platform ends a job. The next attempt goes on where it was."""

    stall_after_s: float = Field(default=3600.0, ge=0)
    """Seconds without an inner step after which a site is started again, though its beats go on; 0: never. Longer than
    the longest step and transfer: a site that waits for others with its offer out is left alone."""

    caches: dict[str, str] = Field(default_factory=dict)
    """Folders that outlive a job where the platform can keep them: name -> absolute path in the job."""

    secrets: tuple[Annotated[str, AfterValidator(_check_variable)], ...] = ()
    """Environment variables of the launcher that a job gets as secrets, besides the ones it always gets."""

    region: str | None = Field(default=None, min_length=1)
    """Where the jobs run, where the platform lets one choose; a bucket in another region is warned about."""

    cloud: str | None = Field(default=None, min_length=1)
    """On whose machines Modal and SkyPilot run them: "aws", "gcp", "oci"."""

    nonpreemptible: bool = False
    """Whether the platform must not take a job's machine back; at a higher price, and on Modal without a GPU only."""

    @model_validator(mode="after")
    def _check_caches(self) -> Self:
        for name, path in self.caches.items():
            if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", name) or not path.startswith("/"):
                raise ValueError(
                    f"launch.caches.{name} ({path}) must be a short lower-case name and an absolute path: "
                    'write weights = "/cache/weights"'
                )
        return self
