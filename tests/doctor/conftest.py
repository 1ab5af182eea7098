"""Recorded machines: a sysfs tree unpacked into a folder, and an NVML that answers from a document."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

CASES = Path(__file__).parent / "cases"
NOT_SUPPORTED = 3


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"NVML error {value}")
        self.value = value


class NVMLLibraryMismatchError(Exception):
    pass


class RecordedNvml:
    """The functions of pynvml, answered from nvml.json."""

    NVMLError = NVMLError
    NVMLLibraryMismatchError = NVMLLibraryMismatchError

    def __init__(self, document):
        self.document = document
        self.open = 0

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.document["gpus"])

    def nvmlSystemGetDriverVersion(self):
        return self.document["driver"].encode()

    def nvmlSystemGetCudaDriverVersion(self):
        return self.document["cuda"]

    def __getattr__(self, function):
        if not function.startswith("nvmlDevice"):
            raise AttributeError(function)

        def answer(handle, *arguments):
            gpu = self.document["gpus"][handle]
            if (exactly := f"{function}{list(arguments)}") in gpu:
                return self._value(gpu[exactly], ())
            if function == "nvmlDeviceGetHandleByIndex":
                return self._value(gpu.get(function, handle), ())
            return self._value(gpu.get(function, {"error": NOT_SUPPORTED}), arguments)

        return answer

    def _value(self, value, arguments):
        if isinstance(value, dict) and value.get("error") == "mismatch":
            raise NVMLLibraryMismatchError
        if isinstance(value, dict) and "error" in value:
            raise NVMLError(value["error"])
        if isinstance(value, list) and arguments:
            if arguments[0] >= len(value):
                raise NVMLError(2)
            value = value[arguments[0]]
        return json.loads(json.dumps(value), object_hook=lambda fields: SimpleNamespace(**fields))


@pytest.fixture
def nvml_of():
    """Case name → its NVML."""
    return lambda case: RecordedNvml(json.loads((CASES / case / "nvml.json").read_text()))


@pytest.fixture
def sysfs_of(tmp_path):
    """Case name → the root of its sysfs."""

    def unpack(case):
        root = tmp_path / case
        for line in (CASES / case / "sysfs.txt").read_text().splitlines():
            path, _, content = line.partition("\t")
            entry = root / path
            if path.endswith("/"):
                entry.mkdir(parents=True)
                continue
            entry.parent.mkdir(parents=True, exist_ok=True)
            if content.startswith("-> "):
                entry.symlink_to(content[3:])
            else:
                entry.write_text(content + "\n")
        return str(root)

    return unpack


@pytest.fixture
def machine(sysfs_of, nvml_of):
    """Case name → everything its probe would find that the case knows about, as `Hardware`."""
    from gpurun.facts import hardware_from_document
    from gpurun.node import nvml
    from gpurun.node.probe import facts

    def build(case, **more):
        root = sysfs_of(case)
        hcas = facts.hcas(root)
        document = {"hcas": hcas, "peermem": facts.peermem(root), "gpus": []}
        document["infiniband_nodes"] = [hca["uverbs"] for hca in hcas if hca["uverbs"]] + ["rdma_cm"]
        if (CASES / case / "nvml.json").exists():
            document.update(nvml.read_nvml(nvml_of(case)))
            facts.gpu_places(root, document["gpus"])
        return hardware_from_document(case, {**document, **more})

    return build
