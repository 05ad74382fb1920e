"""Benchmarks of packing and of reading data: the arithmetic by hand, and that all sides do the same work. No time is asserted."""

import importlib.util
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

import bench
from bench import data, data_peers, data_work, packer, prepare
from bench.data_work import BUDGET, Packed, Seen, Setup
from bench.measure import NoPeer, Result, needs
from eyeline.core.errors import Refused


def test_decreasing_packs_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of 10 tokens and 2 images."""
    monkeypatch.setattr(packer, "TOKENS", 10)
    monkeypatch.setattr(packer, "IMAGES", 2)
    assert packer.decreasing([(3, 2), (7, 0), (2, 1), (6, 0), (2, 0)]) == [[1, 0], [3, 2, 4]]  # 7 + 3, 6 + 2 + 2
    assert packer.decreasing([(3, 2), (7, 1), (2, 1), (6, 0), (2, 0)]) == [[1, 2], [3, 0], [4]]  # no 3 with the 7: three images
    items = [(7, 0), (8, 0), (2, 0), (3, 2)]  # 8, then 7; the 3 fits the 7 alone, the 2 the 8
    assert packer.decreasing(items) == packer.decreasing(items, best=True) == [[1, 2], [0, 3]]
    items = [(6, 0), (7, 2), (5, 0), (3, 1), (1, 0)]  # 7 | 6 + 3 | 5: the first for the 1 is the 7, the best the 6 + 3
    assert packer.decreasing(items) == [[1, 4], [0, 3], [2]]
    assert packer.decreasing(items, best=True) == [[1], [0, 3, 4], [2]]


def test_samples_held_back_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal samples, four to a pack, the bin is closed when it is full: the fourth waits until then."""
    monkeypatch.setattr(packer, "TOKENS", 4)
    assert packer.most_held([(1, 0)] * 12) == 4


def test_prepare_is_timed_and_both_sides_write_the_same() -> None:
    found = prepare.run(pairs=1, shards=1)
    assert found.comparisons[0].amount == data_work.PER_SHARD
    [speed] = found.facts
    assert speed.value == pytest.approx(found.comparisons[0].peer[0].wall_s / found.comparisons[0].ours[0].wall_s)
    assert speed.met == (float(speed.value) >= 1.6)


def test_all_sides_pack_everything_and_lost_samples_are_refused() -> None:
    made_of = packer.run(pairs=1, count=2000)
    assert made_of.comparisons[0].amount == 2000
    assert {f.name: f.met for f in made_of.facts}["fill, ours ÷ best known"] is not None
    with pytest.raises(Refused, match="not pack every sample once"):
        packer.check("made-up", [[0], [0]], [(1, 0), (1, 0)])
    with pytest.raises(Refused, match="10000 tokens"):
        packer.check("made-up", [[0, 1]], [(5000, 0), (5000, 0)])


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work") / "set"
    data_work.make(folder, shards=2)
    return folder


def test_the_work_is_the_same_everywhere_and_of_real_sizes(work: Path, tmp_path: Path) -> None:
    data_work.make(tmp_path / "again", shards=1)
    assert (tmp_path / "again" / "full" / "00.tar").read_bytes() == (work / "full" / "00.tar").read_bytes()
    assert [len(Setup(work, name).paths) for name in ("full", "tiny")] == [2, 1]
    with tarfile.open(work / "full" / "01.tar") as archive:
        content = {info.name: archive.extractfile(info).read() for info in archive}  # type: ignore[union-attr]
    assert len(content) == 2 * data_work.PER_SHARD
    images = [value for name, value in content.items() if name.endswith("jpg")]
    assert 30_000 < sum(map(len, images)) / len(images) < 60_000
    assert 320 <= min(Pillow.open(io.BytesIO(images[0])).size) <= 448
    assert json.loads(content["01-03.json"])["conversations"][0]["value"].startswith("<image>\n")


@pytest.mark.parametrize("peer", data_peers.PEERS)
def test_peers_read_what_ours_reads(work: Path, tmp_path: Path, peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens and pixels, every sample once; two ranks share nothing; and the state resumes, where it can."""
    package = data_peers.PACKAGES[peer]
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    setup = Setup(work, "full")
    if peer == "energon":
        data_peers.prepare_energon(setup)
    seen = {side: Seen.of(pack for pack, _ in data.stream(side, setup, tmp_path / "index")) for side in ("ours", peer)}
    assert data.agree(seen, setup) == 2 * data_work.PER_SHARD
    of_rank = [{id for pack, _ in data.stream(peer, setup, tmp_path, None, n, 2) for id in pack.ids} for n in range(2)]
    assert all(of_rank) and sum(map(len, of_rank)) == 2 * data_work.PER_SHARD == len(set.union(*of_rank))


@pytest.mark.slow  # four processes, five seconds each
@pytest.mark.parametrize("side", ["ours", "DataLoader"])
def test_nothing_is_lost_or_repeated_over_two_processes(work: Path, side: str) -> None:
    """In processes of their own, as the benchmark does it; what they read, too."""
    first = data.probe(side, work, "first")
    resumed = data.probe(side, work, "resume")
    assert len(first["ids"]) >= data_work.PER_SHARD
    assert data.missing({"before": first["ids"], "after": resumed["ids"]}, data.setup_ids(2)) == (0, 0)
    assert resumed["bytes"] > 50_000  # the tokenizer and some images at least
    assert first["peak_bytes"] > 0


def pack(ids: tuple[str, ...], tokens: list[int], labelled: int = 1) -> Packed:
    cu = np.arange(len(ids) + 1)
    return Packed(ids, np.array(tokens), labelled, cu, np.zeros((len(ids), 4), np.uint8), cu)


def test_sides_that_read_otherwise_are_refused(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "PER_SHARD", 2)
    setup = Setup(work, "tiny")
    ours = Seen.of([pack(("00-00", "00-01"), [5, 6])])
    assert ours.padding == 1 - 2 / BUDGET.tokens
    assert data.agree({"ours": ours, "peer": Seen.of([pack(("00-01",), [6], 0), pack(("00-00",), [5])])}, setup) == 2
    for peer, why in (
        ([pack(("00-00",), [5])], "not give every sample"),
        ([pack(("00-00", "00-01", "00-01"), [5, 6, 6])], "not give every sample"),
        ([pack(("00-00", "00-01"), [5, 7])], "other tokens or pixels for 1 samples, such as 00-01"),
        ([pack(("00-00", "00-01"), [5, 6], 2)], "learns from other tokens"),
    ):
        with pytest.raises(Refused, match=why):
            data.agree({"ours": ours, "peer": Seen.of(peer)}, setup)
    assert data.missing({"before": ["a", "b"], "after": ["b", "d"]}, ["a", "b", "c", "d"]) == (1, 1)


def test_the_usual_packing_by_hand() -> None:
    """As they come, until one does not fit: half, a quarter | half and one token, half less one."""
    lengths = [BUDGET.tokens // 2, BUDGET.tokens // 4, BUDGET.tokens // 2 + 1, BUDGET.tokens // 2 - 1]
    samples = [data_peers.Ready(str(n), np.ones(k, int), np.ones(k, int), np.zeros((4, 4), np.uint8)) for n, k in enumerate(lengths)]
    packs = list(data_peers.greedy(samples, lambda n: n))
    assert [p.ids for p, _ in packs] == [("0", "1"), ("2", "3")]
    assert [state() for _, state in packs] == [2, 4]
    assert packs[0][0].cu_S1.tolist() == [0, lengths[0], lengths[0] + lengths[1]]


def test_peers_that_are_missing_are_refused_with_the_command() -> None:
    with pytest.raises(Refused, match=r"\(nowhere_at_all.loader\). Try: pip install --editable '.\[bench-data\]'"):
        needs("bench-data", ["json", "nowhere_at_all.loader"])


def test_cases_without_their_peer_are_left_out_unless_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking(pairs: int) -> Result:
        raise NoPeer("no peer here")

    monkeypatch.setattr(bench, "CASES", {"lacking": lacking, "packer": lambda pairs: packer.run(pairs, count=200)})
    bench.run_cases([], tmp_path, pairs=1)
    assert [path.name for path in tmp_path.iterdir()] == ["packer.json"]
    assert "lacking is left out: no peer here" in capsys.readouterr().err
    with pytest.raises(Refused, match="no peer here"):
        bench.run_cases(["lacking"], tmp_path, pairs=1)
