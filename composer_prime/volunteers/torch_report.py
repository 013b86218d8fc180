"""What torch is here and how fast: `python -m composer_prime.volunteers.torch_report` prints one line of JSON.

A process of its own, so that a broken torch or driver can't take the check of the machine with it.
"""

import json
import time

SIZE = 512
MEASURED_S = 0.3


def measure_flops() -> float:
    """fp32 operations a second of one thread, in a matrix product of the size a small model has."""
    import torch

    torch.set_num_threads(1)
    left, right = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    torch.mm(left, right)
    began, times = time.perf_counter(), 0
    while (passed_s := time.perf_counter() - began) < MEASURED_S:
        torch.mm(left, right)
        times += 1
    return times * 2 * SIZE**3 / passed_s


def main() -> None:
    """Print the report."""
    import torch

    from composer_prime.outer.arithmetic import test_vector

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    report = {
        "version": torch.__version__,
        "flops": measure_flops(),
        "test_vector": test_vector(),
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
