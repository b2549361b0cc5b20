# SPDX-License-Identifier: Apache-2.0
"""Files of tuned configurations: what is refused, and that nothing is lost on the way."""

import json
from pathlib import Path

import pytest

from moe_backend import tuned_configs
from moe_backend.tuning import schema
from moe_backend.types import GemmConfig, KernelConfig, MoEShape

SHAPE = MoEShape(256, 256, 7168, 256, 8)
STAMP = {"triton": "3.6.0", "torch": "2.11.0", "commit": "abc"}


def write(folder: Path, change=lambda data: None, device="NVIDIA H200") -> Path:
    config = KernelConfig(16, up=GemmConfig(unroll=2, num_stages=3), down=GemmConfig(span=2))
    entry = schema.entry(SHAPE, 64, "uniform", config, 300.0, **STAMP)
    path = folder / schema.file_name(device)
    schema.save(path, schema.ConfigFile(device=device, entries=[entry]))
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


def test_round_trip(tmp_path):
    gluon = GemmConfig(kernel="gluon", turns=False)
    for config in (
        KernelConfig(16, direct=True, pdl=False),
        KernelConfig(128, up=gluon, down=gluon, gather=True, slab=1024),
    ):
        entry = schema.entry(SHAPE, 8192, "zipf", config, 1.234, **STAMP)
        path = tmp_path / "x.json"
        schema.save(path, schema.ConfigFile(device="d", entries=[entry]))
        (back,) = schema.load(path, "d").entries
        assert back.config.kernel_config() == config
        assert back.shape.moe_shape() == SHAPE and back.us == 1.23 and back.commit == "abc"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["entries"][0]["config"]["up"].update(block_k=256), "block_k"),
        (lambda d: d["entries"][0]["config"].update(align=48), "align"),
        (lambda d: d["entries"][0]["config"]["up"].update(num_stages=8), "shared memory"),
        (lambda d: d["entries"][0]["config"].update(gather=True), "gathers"),
        (lambda d: d["entries"][0]["config"]["up"].update(kernel="gluon"), "tiles of 128 rows"),
        (lambda d: d["entries"][0]["config"].update(slab=100), "slab"),
        (lambda d: d["entries"][0].update(load="heavy"), "load"),
        (lambda d: d["entries"][0].update(tokens=0), "tokens"),
        (lambda d: d["entries"][0]["shape"].update(block_shape=[128, 64]), "block_shape"),
        (lambda d: d["entries"][0].pop("triton"), "triton"),
        (lambda d: d["entries"][0].update(tile=3), "tile"),
        (lambda d: d.update(version=2), "version"),
    ],
)
def test_an_illegal_file_is_refused_by_name(tmp_path, change, message):
    path = write(tmp_path, change)
    with pytest.raises(schema.ConfigFileError, match=message) as error:
        schema.load(path)
    assert str(path) in str(error.value)


def test_foreign_or_broken_files(tmp_path):
    path = write(tmp_path)
    with pytest.raises(schema.ConfigFileError, match="this device is 'NVIDIA H100'"):
        schema.load(path, "NVIDIA H100")
    path.write_text("{")
    with pytest.raises(schema.ConfigFileError, match=r"NVIDIA_H200\.json"):
        schema.load(path)
    with pytest.raises(schema.ConfigFileError, match="cannot be read"):
        schema.load(tmp_path / "missing.json")


def test_every_shipped_file_loads():
    for folder in tuned_configs.__path__:
        for path in Path(folder).glob("*.json"):
            found = schema.load(path)
            assert schema.file_name(found.device) == path.name
            keys = [(e.shape, e.tokens, e.load) for e in found.entries]
            assert len({str(k) for k in keys}) == len(keys), "an entry stands twice"
