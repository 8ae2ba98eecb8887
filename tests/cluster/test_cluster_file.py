import pytest

from rlplace.cluster import KINDS, Cluster, parse
from rlplace.errors import InputError

HEAD = 'format = "rlplace.cluster"\nversion = 1\n'
DEVICE = '[[device]]\nname = "a"\nkind = "l4"\n'
KIND = HEAD + '[[kind]]\nname = "k"\nlike = "l4"\n'
LINKS = HEAD + DEVICE + "[links]\nbandwidth_bytes_per_s=[[0]]\nlatency_s=[[0]]\n"


def load(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text)
    return Cluster.load(path)


@pytest.mark.parametrize(
    "text", ["a100-80g:4", "v100:8", "a100-40g:2x2+t4:2,eth=10g", "l4:2x2,mem=96g+t4:2", "cpu:1+mi300x:2", "cpu:3"]
)
def test_round_trip(tmp_path, text):
    cluster = Cluster.preset(text)
    cluster.save(tmp_path / "c.toml")
    again = parse(str(tmp_path / "c.toml"))
    assert again.fingerprint == cluster.fingerprint
    assert again.devices == cluster.devices
    assert again.kinds == cluster.kinds
    assert again.hosts == cluster.hosts
    assert again.host_memory_bytes == cluster.host_memory_bytes
    assert again.links.channels == cluster.links.channels
    assert again.name == cluster.name
    assert again.text.endswith("c.toml")


def test_short_file_follows_the_rules_of_presets(tmp_path):
    items = "".join(f'[[device]]\nname = "gpu{i}"\nkind = "a100-80g"\nhost = {i // 2}\n' for i in range(4))
    assert load(tmp_path, HEAD + items).fingerprint == Cluster.preset("a100-80g:2x2").fingerprint
    changed = load(tmp_path, HEAD + items + '[interconnect]\ninside = "pcie"\nnetwork = "eth=25g"\n')
    assert changed.fingerprint == Cluster.preset("a100-80g:2x2,pcie,eth=25g").fingerprint


def test_kinds_of_ones_own(tmp_path):
    cluster = load(
        tmp_path,
        HEAD
        + '[[kind]]\nname = "half"\nlike = "a100-80g"\nmemory_bytes = 40e9\n'
        + '[[kind]]\nname = "new"\nmemory_bytes = 1000000000\nmemory_bandwidth_bytes_per_s = 1e11\n'
        + "peak_flops = {float32 = 1e12}\n"
        + '[[device]]\nname = "x"\nkind = "half"\n[[device]]\nname = "y"\nkind = "new"\nreserved_bytes = 5\n'
        + '[[device]]\nname = "z"\nkind = "l4"\nlaunch_s = 1e-5\nmemory_bytes = 7000000000\n'
        + '[[device]]\nname = "w"\npeak_flops = {float32 = 2e12}\n'
        + "memory_bandwidth_bytes_per_s = 1e11\nmemory_bytes = 3000000000\n",
    )
    assert [d.memory_bytes for d in cluster.devices] == [40_000_000_000, 1_000_000_000, 7_000_000_000, 3_000_000_000]
    assert cluster.devices[1].reserved_bytes == 5
    assert cluster.kinds[0].peak_flops == KINDS["a100-80g"].peak_flops
    assert cluster.kinds[2].launch_s == 1e-5
    assert cluster.kinds[2].name == "l4/z"
    assert cluster.kinds[3].name == "w"


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "expected format"),
        ("format = 3", "expected format"),
        (HEAD, "key 'device' is missing"),
        (HEAD + "device = []", r"cluster: device: expected a list of 1 to 131072, found \[\]"),
        (HEAD + "device = 4", "cluster: device: expected a list of 1 to 131072, found 4"),
        (HEAD.replace("1", "2") + DEVICE, "upgrade rlplace"),
        (HEAD.replace("1", "true") + DEVICE, "version must be a whole number from 1 up, found True"),
        (HEAD + DEVICE + "memroy_bytes = 4", "did you mean 'memory_bytes'"),
        (HEAD + "devices = 3\n" + DEVICE, "did you mean 'device'"),
        (HEAD + DEVICE.replace("l4", "l44"), "did you mean 'l4'"),
        (HEAD + DEVICE + "memory_bytes = 0", "a device needs memory"),
        (HEAD + DEVICE + "memory_bytes = -5", r"device\[0\]: memory_bytes: expected a whole number in 0.*found -5"),
        (HEAD + DEVICE + "memory_bytes = inf", r"device\[0\]: memory_bytes: expected a whole number .* found inf"),
        (HEAD + DEVICE + "memory_bytes = 1.5", r"device\[0\]: memory_bytes: expected a whole number .* found 1.5"),
        (HEAD + DEVICE + "reserved_bytes = 99000000000000", "reserved_bytes"),
        (HEAD + DEVICE + "host = -1", r"device\[0\]: host: expected a whole number in 0..131071, found -1"),
        (HEAD + DEVICE + "host = 99999999", r"device\[0\]: host: expected a whole number in 0..131071, found 99999999"),
        (HEAD + DEVICE + DEVICE, "unique"),
        (HEAD + '[[device]]\nname = "a"\n', "'peak_flops' is missing; give it"),
        (
            HEAD + '[[device]]\nname = "a"\npeak_flops = {float32 = 1e12}\nmemory_bandwidth_bytes_per_s = 1e9',
            "'memory_bytes' is missing",
        ),
        (HEAD + '[[kind]]\nname = "k"\n' + DEVICE, "is missing; give it, or name a preset"),
        (HEAD + '[[kind]]\nname = "k"\nlike = "l5"\n' + DEVICE, "did you mean 'l4'"),
        (KIND + KIND.removeprefix(HEAD) + DEVICE, "defined twice"),
        (KIND + "peak_flops = {float32 = -1}\n" + DEVICE, r"kind\[0\]: peak_flops\['float32'\]: .* 1000..1e\+19"),
        (KIND + "peak_flops = {float16 = 1e12}\n" + DEVICE.replace("l4", "k"), "at least float32"),
        (KIND + "peak_flops = {float32 = 1e12, int8 = 1e12}\n" + DEVICE, "peak_flops: unknown key 'int8'"),
        (KIND + "pcie_generation = 9\n" + DEVICE, "pcie_generation: expected one of 3, 4, 5, found 9"),
        (KIND + 'nvlink = "swich"\n' + DEVICE, "did you mean 'switch'"),
        (KIND + "gemm_efficiency = {float32 = 2.0}\n" + DEVICE, "gemm_efficiency.*1e-06..1, found 2.0"),
        (
            HEAD + DEVICE + "[interconnect]\ninside = 'token ring'",
            "interconnect.inside: unknown inside 'token ring'; known: nvlink, pcie",
        ),
        (HEAD + "host_memory_bytes = [1, 2]\n" + DEVICE, "has 2 entries for 1 hosts"),
        (HEAD + DEVICE + "[interconnect]\nnetwork = 'ib'", "not of the form"),
        (HEAD + DEVICE + "[interconnect]\n[links]\nbandwidth_bytes_per_s=[[0]]\nlatency_s=[[0]]", "not both"),
        (HEAD + DEVICE + "[links]\nbandwidth_bytes_per_s=[[0, 1]]\nlatency_s=[[0]]", "1 x 1 matrix"),
        (
            HEAD + DEVICE + "[links]\nbandwidth_bytes_per_s=[[-1]]\nlatency_s=[[0]]",
            "links.bandwidth_bytes_per_s.*finite number from 0.001 up, found -1",
        ),
        (LINKS + "channels=[[[1, 1]]]", "a channel appears twice"),
        (LINKS + "channels=[[[-1]]]", "links.channels.*0..1048575, found -1"),
        (HEAD + DEVICE + "name = 'again'", "not valid TOML"),
        (HEAD + "x = " + "[" * 5000, "nested too deeply|not valid TOML"),
        (HEAD + "x = " + "9" * 5000, "not valid TOML"),
    ],
)
def test_hostile_files_are_refused_in_one_line(tmp_path, text, says):
    with pytest.raises(InputError, match=says) as caught:
        load(tmp_path, text)
    assert "c.toml" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_names_with_quotes_and_control_characters_survive(tmp_path):
    name = 'a "b" \\ \t \x7f \u2603'
    text = HEAD + DEVICE
    cluster = load(tmp_path, text)
    renamed = Cluster(name, cluster.devices, cluster.kinds, cluster.links, cluster.hosts)
    renamed.save(tmp_path / "n.toml")
    assert Cluster.load(tmp_path / "n.toml").name == name
