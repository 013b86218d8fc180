"""The arithmetic of the outer loop: tensors in, tensors out, no store and no clock.

Everything that decides a master's bits lives in this room: fragments, pseudo-gradients, codecs, the weighted mean, the
outer optimizer and the merge. `sync` moves the results; importing this package alone brings no torch.
"""
