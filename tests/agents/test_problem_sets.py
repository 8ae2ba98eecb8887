"""Problem sets of the agent: the training stream, the splits, files of cases, and what `--problems` names."""

import dataclasses
import itertools

import numpy as np
import pytest

from rlplace.agents import problems
from rlplace.agents.problems import graphs, sources, splits, training
from rlplace.agents.problems.cases import ProblemCase, is_branchy
from rlplace.agents.problems.training import limit_memory, settle, vary_hardware
from rlplace.cluster.parse import Cluster
from rlplace.errors import InfeasibleError, InputError
from rlplace.placement import get_planner
from rlplace.problem.generate import random_problem

SYNTHETIC = ("synthetic",)


def facts(case):
    return case.name, case.family, case.problem.fingerprint, case.branchy, case.unseen_cluster


def small_cases(count=3):
    return [
        ProblemCase(f"small-{i}", "synthetic:chain", random_problem(i, 6, 2, memory_factor=2.0), i == 1, i == 2)
        for i in range(count)
    ]


# The training stream


def test_a_case_depends_on_seed_and_number_alone():
    first = [facts(training.training_case(7, number, families=SYNTHETIC)) for number in range(6)]
    assert facts(training.training_case(7, 2, families=SYNTHETIC)) == first[2]
    assert len({fingerprint for _, _, fingerprint, *_ in first}) == 6
    assert training.training_case(8, 2, families=SYNTHETIC).problem.fingerprint != first[2][2]


def test_synthetic_cases_hold_their_ranges():
    cases = [training.training_case(0, number, families=SYNTHETIC) for number in range(80)]
    assert {case.family for case in cases} == {f"synthetic:{shape}" for shape in training.SHAPES}
    assert {case.problem.num_devices for case in cases} <= set(graphs.SIZES)
    low, high = training.GROUPS
    groups = np.array([case.problem.num_groups for case in cases])
    assert groups.min() >= low and groups.max() <= high
    assert np.median(groups) < (low + high) / 2  # log-uniform, not uniform
    limited = np.mean([np.isfinite(case.problem.memory_limit_bytes).all() for case in cases])
    assert 0.5 < limited < 0.9
    assert 0.2 < np.mean([case.branchy for case in cases]) < 0.9
    assert not any(case.unseen_cluster for case in cases)


def test_captured_models_are_few_at_a_time_and_change_later(monkeypatch):
    kept = graphs.captured
    graph = kept(("zoo:mlp,layers=2,width=64", 8, 8))
    asked = []
    monkeypatch.setattr(graphs, "captured", lambda recipe: asked.append(recipe) or graph)
    options = {"families": training.ZOO_FAMILIES, "refresh": 30}
    assert graphs.MOST_GRAPHS >= training.GRAPHS
    monkeypatch.setattr(training, "GRAPHS", 3)
    for number in range(30):
        training.training_case(1, number, **options)
    first = set(asked)
    assert 1 < len(first) <= 3
    asked.clear()
    for number in range(30, 60):
        training.training_case(1, number, **options)
    assert 1 < len(set(asked)) <= 3
    assert set(asked) != first
    assert kept.cache_info().maxsize == graphs.MOST_GRAPHS


def test_a_captured_case_is_the_same_again_and_knows_no_source(monkeypatch):
    graph = graphs.captured(("zoo:mlp,layers=2,width=64", 8, 8))
    monkeypatch.setattr(graphs, "captured", lambda recipe: graph)
    one, two = (training.training_case(3, 5, families=("zoo:mlp",)) for _ in range(2))
    assert facts(one) == facts(two)
    assert one.family == "zoo:mlp"
    assert one.problem.source is None and one.problem.group_ops is None  # it is not what the cluster's text says
    fixed = training.training_case(3, 5, families=("zoo:mlp",), cluster="a100-80g:2")
    assert [device.kind for device in fixed.problem.devices] == ["a100-80g"] * 2


def test_recipes_of_every_family_are_of_the_family():
    for name, family in graphs.FAMILIES.items():
        spec, batch, seq = family.draw(name, np.random.default_rng(0))
        assert spec.split(",")[0] == name
        assert batch >= 1 and seq >= 1
    turns = [graphs.variant(tuple(graphs.FAMILIES), 0, slot)[0] for slot in range(training.GRAPHS)]
    assert all(turns.count(name) == family.share for name, family in graphs.FAMILIES.items())


def test_an_unknown_family_is_refused():
    with pytest.raises(InputError, match="zoo:mlp"):
        training.training_case(0, 0, families=("zoo:mpl",))


# Clusters


def test_training_draws_no_cluster_that_is_called_unseen():
    rng = np.random.default_rng(0)
    drawn = [Cluster.preset(graphs.draw_cluster(rng)) for _ in range(300)]
    assert not any(graphs.is_unseen_cluster(cluster) for cluster in drawn)
    assert {cluster.num_devices for cluster in drawn} == set(graphs.SIZES)
    assert {len(set(cluster.hosts)) for cluster in drawn} == set(graphs.HOSTS)
    assert any(len({kind.name for kind in cluster.kinds}) == 2 for cluster in drawn)
    for size in graphs.SIZES:
        assert {graphs.draw_hosts(rng, size) for _ in range(30)} <= set(graphs.HOSTS)


def test_unseen_clusters_are_unseen_and_validation_has_none_of_the_tests():
    assert not any(graphs.is_unseen_cluster(Cluster.preset(text)) for text in graphs.SEEN_CLUSTERS)
    tested = [Cluster.preset(text) for text in graphs.TEST_CLUSTERS]
    tuned = [Cluster.preset(text) for text in graphs.VALIDATION_CLUSTERS]
    assert all(graphs.is_unseen_cluster(cluster) for cluster in tested + tuned)
    assert all(2 <= cluster.num_devices <= 16 for cluster in tested + tuned)
    assert not {cluster.num_devices for cluster in tuned} & {cluster.num_devices for cluster in tested}
    assert not {kind.name for cluster in tuned for kind in cluster.kinds} & {"l4", "mi300x"}


# Changes


def test_varied_hardware_scales_devices_and_pairs():
    problem = random_problem(3, 10, 4, hosts=2)
    varied = [vary_hardware(problem, np.random.default_rng(seed)) for seed in range(12)]
    for item in varied:
        ratio = item.time_s / problem.time_s
        assert np.allclose(ratio, ratio[0])
        wide = item.links.bandwidth_bytes_per_s / problem.links.bandwidth_bytes_per_s
        assert np.allclose(wide, wide.T)
        assert item.links.channels == problem.links.channels
    assert len({item.fingerprint for item in varied}) > 8
    assert any(np.ptp(item.time_s[0]) > 0 for item in varied)


def test_memory_at_factor_one_holds_a_plan_and_a_third_less_hardly_any():
    best = get_planner("best")
    failed = 0
    for seed in range(6):
        shape = ("chain", "branchy", "layered")[seed % 3]
        problem = random_problem(seed, 24, 3 + seed % 2, shape=shape, null_fraction=0.1 * (seed % 2))
        plan = best(limit_memory(problem, 1.0))
        assert plan.predicted.feasible
        try:
            best(limit_memory(problem, 0.67))
        except InfeasibleError:
            failed += 1
    assert failed >= 3


def test_memory_follows_factor_and_shares():
    problem = random_problem(0, 20, 3)
    one = limit_memory(problem, 1.0).memory_limit_bytes
    assert np.allclose(limit_memory(problem, 2.0).memory_limit_bytes, 2 * one, rtol=1e-4)
    assert np.ptp(one) == 0
    shared = limit_memory(problem, 1.5, shares=np.array([1.0, 2.0, 4.0])).memory_limit_bytes
    assert np.allclose(shared / shared[0], [1, 2, 4], rtol=1e-4)
    assert limit_memory(problem, None) is problem


def test_settled_problems_do_not_tell_the_last_bits_of_a_machine():
    problem = random_problem(5, 12, 3, null_fraction=0.3)
    other = dataclasses.replace(problem, time_s=np.nextafter(problem.time_s, 1.0))
    assert problem.fingerprint != other.fingerprint
    assert settle(problem).fingerprint == settle(other).fingerprint
    assert np.allclose(settle(problem).time_s, problem.time_s, rtol=1e-8, atol=0, equal_nan=True)


# The splits


def test_families_of_the_sets_are_disjoint():
    trained = {*graphs.FAMILIES, *(f"synthetic:{shape}" for shape in training.SHAPES)}
    tuned, tested = set(splits.VALIDATION), set(splits.TEST)
    assert not trained & tuned and not trained & tested and not tuned & tested
    assert set(splits.VALIDATION_COUNTS) == tuned and set(splits.TEST_COUNTS) == tested
    for table in (splits.VALIDATION, splits.TEST):
        for family, variants in table.items():
            for item in variants:
                spec = item if isinstance(item, str) else item[0].split(",")[0]
                assert spec == family.removeprefix("synthetic:")


def only(table, family, count):
    return dataclasses.replace(splits.SPLITS["test"], families={family: table[family]}, counts={family: count})


def test_cases_of_a_split_are_the_same_again_and_mixed():
    split = only(splits.TEST, "synthetic:wavefront", 12)
    one, two = (splits.build(split) for _ in range(2))
    assert [facts(case) for case in one] == [facts(case) for case in two]
    assert len({case.name for case in one}) == 12
    assert all(case.family == "synthetic:wavefront" and case.branchy for case in one)
    assert {case.unseen_cluster for case in one} == {True, False}
    assert {bool(np.isfinite(case.problem.memory_limit_bytes).all()) for case in one} == {True, False}


def test_a_split_is_read_from_its_folder_and_made_anew_by_other_sources(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(splits, "build", lambda split: made.append(split.name) or small_cases())
    told = []
    first = problems.split_cases("test", tmp_path / "test", progress=told.append)
    again = problems.split_cases("test", tmp_path / "test", progress=told.append)
    assert made == ["test"] and len(told) == 1
    assert [facts(case) for case in again] == [facts(case) for case in first]
    monkeypatch.setattr(splits, "made_by", lambda: {"sources": "other"})
    problems.split_cases("test", tmp_path / "test", progress=told.append)
    assert made == ["test", "test"] and any("anew" in line for line in told)
    (tmp_path / "test" / "cases.json").write_text("{}")  # a cache that cannot be read is made anew
    problems.split_cases("test", tmp_path / "test")
    assert made == ["test", "test", "test"]
    monkeypatch.setenv("RLPLACE_CACHE", str(tmp_path / "cache"))
    problems.split_cases("validation")
    assert made[-1] == "validation"
    assert (tmp_path / "cache" / "cases" / "validation" / "cases.json").is_file()
    monkeypatch.setenv("RLPLACE_CACHE", "0")  # keeps nothing
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert problems.split_cases("validation") and made[-1] == "validation"
    assert sorted(tmp_path.rglob("*")) == before


def test_closing_cases_without_transformers_are_those_that_need_none(monkeypatch):
    monkeypatch.setattr(splits, "find_spec", lambda name: None)
    graph = graphs.captured(("zoo:mlp,layers=2,width=64", 8, 8))
    asked = []
    monkeypatch.setattr(graphs, "captured", lambda recipe: asked.append(recipe[0]) or graph)
    cases = problems.closing_cases()
    assert {case.family for case in cases} == {"zoo:unet", "synthetic:towers"}
    assert len(asked) == splits.VALIDATION_COUNTS["zoo:unet"]
    whole = splits.build(splits.SPLITS["validation"])
    assert {case.name for case in cases} < {case.name for case in whole}
    by_name = {case.name: facts(case) for case in whole}
    assert all(by_name[case.name] == facts(case) for case in cases)  # leaving families out changes no other case


# Files


def test_cases_go_to_files_and_back(tmp_path):
    cases = small_cases()
    problems.save_cases(cases, tmp_path / "set", made_by={"torch": "2"})
    kept, made_by = problems.load_cases(tmp_path / "set")
    assert [facts(case) for case in kept] == [facts(case) for case in cases]
    assert made_by == {"torch": "2"}
    problems.save_cases(cases[:1], tmp_path / "set")  # replaces it
    assert [item.name for item in sorted((tmp_path / "set").iterdir())] == ["cases.json", "small-0.problem.json"]
    assert [item.name for item in tmp_path.iterdir()] == ["set"]


def test_files_that_were_changed_or_do_not_belong_are_refused(tmp_path):
    cases = small_cases(2)
    problems.save_cases(cases, tmp_path / "set")
    index = tmp_path / "set" / "cases.json"
    problems.save_cases(cases, tmp_path / "set", made_by={"torch": "2"})
    index.write_text(index.read_text().replace('"family"', '"microbatches":1,"family"'))  # as version 1 had it
    with pytest.raises(InputError, match="microbatches"):
        problems.load_cases(tmp_path / "set")
    problems.save_cases(cases, tmp_path / "set")
    cases[1].problem.save(tmp_path / "set" / "small-0.problem.json")
    with pytest.raises(InputError, match="is not the problem that"):
        problems.load_cases(tmp_path / "set")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="holds other files"):
        problems.save_cases(cases, tmp_path / "full")
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"
    for bad in ("../x", "a b", ""):
        with pytest.raises(InputError, match="names must differ"):
            problems.save_cases([dataclasses.replace(cases[0], name=bad)], tmp_path / "new")
    with pytest.raises(InputError, match="names must differ"):
        problems.save_cases([cases[0], cases[0]], tmp_path / "new")
    index = tmp_path / "set" / "cases.json"
    index.write_text(index.read_text().replace("small-0", "../small-0"))
    with pytest.raises(InputError, match="is not the name of a case"):
        problems.load_cases(tmp_path / "set")
    index.write_text(index.read_text().replace('"branchy": false', '"branchy": 0', 1))
    with pytest.raises(InputError, match=r"cases\.json: cases\[0\]\.branchy: expected true or false, found 0"):
        problems.load_cases(tmp_path / "set")


def test_sources_of_a_person_s_own_files(tmp_path):
    cases = small_cases()
    folder = tmp_path / "plain"
    folder.mkdir()
    for case in cases:
        case.problem.save(folder / f"{case.name}.problem.json")
    problems.save_cases(cases, tmp_path / "set")
    whole = problems.cases_of([str(folder)])
    assert whole.count == 3 and [case.family for case in whole] == ["small-0", "small-1", "small-2"]
    two = [str(folder / f"small-{i}.problem.json") for i in (2, 0)]
    picked = problems.cases_of(two)
    assert [case.problem.fingerprint for case in picked] == [cases[i].problem.fingerprint for i in (2, 0)]
    assert facts(picked.case(1)) == facts(list(picked)[1])
    saved = problems.cases_of([str(tmp_path / "set"), *two])
    assert saved.count == 5


def test_sources_by_name(monkeypatch):
    synthetic = problems.cases_of(["synthetic"], seed=4)
    assert synthetic.count is None
    expected = [training.training_case(4, number, families=SYNTHETIC) for number in range(3)]
    assert [facts(case) for case in itertools.islice(synthetic, 3)] == [facts(case) for case in expected]
    assert problems.default_set() == "all" == problems.cases_of([]).name
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    assert problems.default_set() == "zoo" == problems.cases_of([]).name


def test_sources_that_cannot_be(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"unknown problem set 'zo'.*synthetic"):
        problems.cases_of(["zo"])
    with pytest.raises(InputError, match="stands alone"):
        problems.cases_of(["zoo", "my.problem.json"])
    with pytest.raises(InputError, match="holds no"):
        problems.cases_of([str(tmp_path / "empty")])
    with pytest.raises(InputError, match="leave --cluster out"):
        problems.cases_of([str(tmp_path)], cluster="a100-80g:2")


# The shapes that only the splits have


@pytest.mark.parametrize("shape", ["towers", "wavefront"])
@pytest.mark.parametrize(("groups", "width"), [(1, 4), (2, 8), (5, 9), (40, 1), (60, 5)])
def test_shapes_of_the_splits_are_graphs_of_all_sizes(shape, groups, width):
    problem = random_problem(1, groups, 2, shape=shape, width=width)
    assert problem.num_groups == groups
    if groups in (1, 2, 60):  # one or two groups or one row cannot be branchy, five wide rows must be
        assert is_branchy(problem) == (groups == 60)
    if width == 1:
        assert not is_branchy(problem)
