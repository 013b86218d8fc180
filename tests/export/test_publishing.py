"""Who may publish: in a run that admits keys only who signs with one, and a follower believes nobody else."""

import pytest
import torch

from composer_prime.errors import ConfigError, CorruptObject
from composer_prime.export.bits import Bits, bits_sha256, rounded_bits
from composer_prime.export.card import FragmentWeights
from composer_prime.export.publishing import Publisher
from composer_prime.export.reading import MasterReader
from composer_prime.export.steps import apply_chain, find_chain, published_versions
from composer_prime.store import keys, open_store
from composer_prime.store.base import Store
from composer_prime.sync.signatures import SigningKey
from composer_prime.sync.start import Founding
from tests.cli.command_line import call
from tests.export.test_following import Growing
from tests.sync.harness import ThreadSite, make_terms, run_sites

OWNER, OTHER = SigningKey.from_bytes(bytes(32)), SigningKey.from_bytes(bytes([9] * 32))
SITES = {name: SigningKey.from_bytes(bytes([place] * 32)) for place, name in enumerate("ab", start=1)}


def make_signed(name: str) -> Store:
    store = open_store(f"memory://{name}")
    founding = Founding(OWNER.public, {site: key.public for site, key in SITES.items()})
    terms = make_terms(quorum=2, snapshot_rounds=1)
    run_sites(
        *(
            ThreadSite(store, terms, site, data_seed=ord(site), key=key, founding=founding)
            for site, key in SITES.items()
        )
    )
    return store


def weights_at(reader: MasterReader, fragment: int, version: int) -> tuple[FragmentWeights, Bits]:
    master = reader.master(fragment, version)
    bits = rounded_bits(master.weights, torch.bfloat16)
    return FragmentWeights(version=version, master_sha256=master.sha256, bits_sha256=bits_sha256(bits)), bits


def test_in_a_run_with_keys_an_admitted_publisher_is_believed_and_nobody_else(request):
    growing = Growing(make_signed(f"{request.node.name}-whole"), request.node.name)
    growing.show(1)
    for key, name in ((None, "a"), (OTHER, "a"), (SITES["a"], "publisher")):
        with pytest.raises(ConfigError, match=r"key|admitted"):
            Publisher(MasterReader(growing.store, key), "bfloat16", name)
    publishing = Publisher(MasterReader(growing.store, SITES["a"]), "bfloat16", "a")
    publishing.tick()
    growing.show(2)
    steps = publishing.tick()
    assert len(steps) == 2
    reader = MasterReader(growing.store)
    assert published_versions(reader, "bfloat16") == [1, 2]
    held, bits = weights_at(reader, 0, 1)
    wanted, expected = weights_at(reader, 0, 2)
    chain = find_chain(reader, "bfloat16", 0, held, 2)
    made = apply_chain(reader, chain, bits)
    assert (made == expected).all() and chain.steps[0].sha256 == wanted.bits_sha256
    key = keys.export_step("bfloat16", 0, 2)
    forged = steps[0].model_copy(update={"signature": OTHER.sign(steps[0].message(reader.run.sha256))})
    for record, said in ((forged, "signature that is not a's"), (steps[0], "is not signed")):
        growing.store.put(key, record.model_copy(update={"publisher": "a"}).to_bytes())
        with pytest.raises(CorruptObject, match=said):
            find_chain(reader, "bfloat16", 0, held, 2)


def test_the_command_publishes_what_is_due_and_ends_with_the_run(tmp_path, capsys, monkeypatch):
    store = open_store(str(tmp_path / "run"))
    terms = make_terms(quorum=2, snapshot_rounds=1, rounds=2)
    run_sites(*(ThreadSite(store, terms, name, data_seed=place) for place, name in enumerate("ab")))
    growing = Growing(store, "unused")
    growing.store = open_store(str(tmp_path / "growing"))
    growing.show(1)
    once = call(capsys, monkeypatch, "publish", growing.store.uri, "--dtype", "float32", "--once")
    assert (once.code, once.err) == (0, "")
    sizes = [fragment.numel for fragment in MasterReader(store).run.fragments]
    for line, fragment in zip(once.out.splitlines(), (0, 1), strict=True):
        assert line.startswith(f"fragment {fragment} version 0 to 1: {sizes[fragment]} weights changed, ")
    again = call(capsys, monkeypatch, "publish", growing.store.uri, "--dtype", "float32", "--once")
    assert (again.code, again.out) == (0, "")
    refused = call(capsys, monkeypatch, "publish", growing.store.uri, "--dtype", "int8")
    assert refused.code == 2 and refused.err.count("\n") == 1 and "dtype (int8)" in refused.err
    growing.show(5)
    last = call(capsys, monkeypatch, "publish", growing.store.uri, "--dtype", "float32")
    assert (last.code, last.err) == (0, "") and last.out.startswith("fragment 0 version 1 to 3: ")
