"""What the outer loop tells its trainer after each inner step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OuterReport:
    """What one inner step meant for the outer loop.

    stop      the run has ended; the parameters hold the final masters
    stall_s   seconds the training thread spent in the outer loop in this step; the wait for the others once there is
              nothing left to train is not in it, but in the summary's finish_s
    round     rounds closed so far, over all fragments, as this site knows
    upload_s  seconds that coding and uploading took beside training, since this process began
    bytes_up, bytes_down   what went to and came from the bucket since then
    adopted   fragments whose parameters were moved to a newer master in this step
    """

    stop: bool
    stall_s: float
    round: int
    upload_s: float
    bytes_up: int
    bytes_down: int
    adopted: tuple[int, ...] = ()
