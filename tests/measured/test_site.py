"""Descriptions of clusters: what changes their fingerprint, what does not, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.errors import InputError
from rlplace.measured.site import Site, site_of
from rlplace.runtime.environment import local_facts

FAST = {"host": "a", "device": "NVIDIA A100", "device_memory_gib": 80, "torch": "2.13.0"}
SLOW = FAST | {"host": "b", "device": "NVIDIA T4", "device_memory_gib": 16}

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
FACTS = st.dictionaries(
    TEXT.filter(bool), TEXT | st.integers(-(1 << 52), 1 << 52) | st.floats(-1e15, 1e15, allow_nan=False), max_size=12
)


@settings(max_examples=60)
@given(TEXT, FACTS)
def test_the_fingerprint_is_that_of_the_facts(name, facts):
    site = Site(name, facts)
    assert Site("other", dict(reversed(facts.items()))).fingerprint == site.fingerprint


@settings(max_examples=60)
@given(FACTS, TEXT.filter(bool), TEXT)
def test_every_fact_counts(facts, key, value):
    with_fact = Site("", facts | {key: value})
    without = Site("", {k: v for k, v in facts.items() if k != key})
    other = Site("", facts | {key: value + "x"})
    assert len({with_fact.fingerprint, without.fingerprint, other.fingerprint}) == 3


def test_facts_named_name_or_source_count_too():
    assert Site("", {"name": "a"}).fingerprint != Site("", {"name": "b"}).fingerprint
    assert Site("", {"source": "a"}).fingerprint != Site("", {"source": "b"}).fingerprint


def test_whole_numbers_are_the_same_however_written():
    assert Site("", {"gib": 80.0}).fingerprint == Site("", {"gib": 80}).fingerprint
    assert Site("", {"gib": "80"}).fingerprint != Site("", {"gib": 80}).fingerprint


def test_ranks_that_agree_give_plain_facts():
    site = site_of([FAST, FAST], name="lab", label="east", details={"backend": "nccl"})
    expected = {"backend": "nccl", "device": "NVIDIA A100", "device_memory_gib": 80, "hosts": 1, "label": "east"}
    assert site == Site("lab", expected | {"processes": 2, "torch": "2.13.0"})
    assert list(site.facts) == sorted(site.facts)


def test_ranks_that_differ_are_told_in_order():
    site = site_of([FAST, FAST, SLOW])
    assert site.facts["device"] == '[[2,"NVIDIA A100"],[1,"NVIDIA T4"]]'
    assert site.facts["torch"] == "2.13.0"
    assert site.facts["host_of_process"] == "[[2,0],[1,1]]"
    assert site.fingerprint != site_of([SLOW, FAST, FAST]).fingerprint


def test_a_fact_that_some_ranks_lack_is_told():
    site = site_of([FAST | {"cuda": "12.8"}, FAST])
    assert site.facts["cuda"] == '[[1,"12.8"],[1,null]]'


def test_renamed_hosts_are_the_same_cluster():
    renamed = [FAST | {"host": "x"}, FAST | {"host": "y"}]
    assert site_of(renamed).fingerprint == site_of([FAST, FAST | {"host": "b"}]).fingerprint
    assert site_of(renamed).fingerprint != site_of([FAST, FAST]).fingerprint


def test_layout_over_hosts_counts():
    two, three = [FAST | {"host": h} for h in "aabb"], [FAST | {"host": h} for h in "aaab"]
    assert site_of(two).fingerprint != site_of(three).fingerprint


def test_a_label_tells_like_clusters_apart():
    prints = {site_of([FAST], label=label).fingerprint for label in ("", "slow link", "fast link")}
    assert len(prints) == 3
    assert site_of([FAST], name="x").fingerprint == site_of([FAST], name="y").fingerprint


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"a": float("nan")}, "not a finite number"),
        ({"a": float("inf")}, "not a finite number"),
        ({"a": True}, "expected a number"),
        ({"a": None}, "expected a number"),
        ({"a": [1]}, "expected a number"),
        ({"a": {"b": 1}}, "expected a number"),
        ({"a": 1 << 60}, "too large to be kept exactly"),
        ({"a": 10**400}, "too large"),
        ({"a": "x" * 70_000}, "text of at most 65536 characters"),
        ({str(i): "x" * 60_000 for i in range(20)}, "as JSON"),
        ({"a": "\ud800"}, "cannot be written as UTF-8"),
        ({"\ud800": "a"}, "name of a fact"),
        ({"": 1}, "name of a fact: expected text .* that is not empty"),
        ({1: 1}, "name of a fact"),
        ({str(i): i for i in range(300)}, "at most 256"),
        ([], "values by name"),
        (None, "values by name"),
    ],
)
def test_refused_facts(facts, message):
    with pytest.raises(InputError, match=message) as caught:
        Site("", facts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [None, 3, "x" * 2000, "\ud800"])
def test_refused_names(name):
    with pytest.raises(InputError, match="name"):
        Site(name, {})


def test_refused_facts_of_ranks():
    for facts in ({"a": float("nan")}, {3: "a"}):
        with pytest.raises(InputError, match="site"):
            site_of([facts])


def test_facts_of_this_process():
    facts = local_facts(torch.device("cpu"))
    assert facts == local_facts(torch.device("cpu"))
    assert {"host", "device", "device_type", "device_memory_gib", "cores", "threads", "torch", "python"} <= set(facts)
    site = site_of([facts, facts], details={"backend": "gloo"})
    assert site.facts["torch"] == torch.__version__
    assert type(site.facts["torch"]) is str
    assert "host" not in site.facts


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_facts_of_a_cuda_device():
    facts = local_facts(torch.device("cuda", 0))
    assert facts["device"] == torch.cuda.get_device_name(0)
    assert facts["device_memory_gib"] > 0
    assert facts["cuda"] == torch.version.cuda
    assert site_of([facts]).fingerprint == site_of([local_facts(torch.device("cuda", 0))]).fingerprint
