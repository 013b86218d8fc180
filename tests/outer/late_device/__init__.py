"""A simulated accelerator whose work is as late as it may be, for code that must wait for a device.

It is torch's PrivateUse1 backend `late` with two devices in this process's memory, compiled from the C++ beside this.
It is no CUDA card: it has the order of streams, events and allocators, and nothing of their speed or their faults.
"""
