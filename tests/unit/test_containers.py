"""Manifests for Kubernetes, Dockerfile, conda recipe and workflows agree with what they start."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/containers"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Of the fields of kubeflow-trainer-api 2.3.0, which has those of pods, too: what manifests use.
# "!": it must be there.
CONTAINER = {
    "name!": str,
    "image": str,
    "imagePullPolicy": str,
    "command": [str],
    "args": [str],
    "securityContext": {"runAsUser": int, "runAsGroup": int},
    "readinessProbe": {"tcpSocket": {"port!": int}},
    "resources": {"limits": dict},
    "volumeMounts": [{"name!": str, "mountPath!": str}],
}
POD = {
    "spec": {
        "securityContext": {"fsGroup": int},
        "containers!": [CONTAINER],
        "volumes": [{"name!": str, "emptyDir": {"medium": str, "sizeLimit": str}}],
    }
}
JOB_SET = {
    "network": {"publishNotReadyAddresses": bool},
    "successPolicy": {"operator!": str, "targetReplicatedJobs": [str]},
    "replicatedJobs": [
        {
            "name!": str,
            "dependsOn": [{"name!": str, "status!": str}],
            "template!": {"metadata": {"labels": dict}, "spec": {"template!": POD}},
        }
    ],
}
MPI = {
    "mpiImplementation": str,
    "numProcPerNode": int,
    "sshAuthMountPath": str,
    "runLauncherAsNode": bool,
}
TOP = {"apiVersion": str, "kind": str, "metadata": {"name": str, "labels": dict}}
FIELDS = {
    "TrainJob": {
        **TOP,
        "spec": {
            "runtimeRef!": {"apiGroup": str, "kind": str, "name!": str},
            "trainer": {"numNodes": int, "numProcPerNode": int, "command": [str], "args": [str]},
        },
    },
    "TrainingRuntime": {
        **TOP,
        "spec": {"mlPolicy": {"numNodes": int, "mpi": MPI}, "template": {"spec": JOB_SET}},
    },
}
[MPIJOB] = yaml.safe_load_all((FOLDER / "mpijob.yaml").read_text())
RUNTIME, TRAINJOB = yaml.safe_load_all((FOLDER / "trainjob.yaml").read_text())


def wrong(given, fields, path=""):
    """Yield the places of what is no field, of another type, or missing."""
    if isinstance(fields, dict) and isinstance(given, dict):
        known = {name.rstrip("!"): kind for name, kind in fields.items()}
        yield from (
            f"{path}.{name[:-1]}" for name in fields if name[-1] == "!" and name[:-1] not in given
        )
        for name, value in given.items():
            yield from wrong(value, known.get(name), f"{path}.{name}")
    elif isinstance(fields, list) and isinstance(given, list):
        for i, value in enumerate(given):
            yield from wrong(value, fields[0], f"{path}[{i}]")
    elif type(given) is not fields:
        yield path


@pytest.mark.parametrize("document", [RUNTIME, TRAINJOB], ids=lambda each: each["kind"])
def test_trainer_knows_each_field(document):
    assert document["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    fields = FIELDS[document["kind"]]
    assert [*wrong(document, fields)] == []
    spec = document["spec"]
    assert [*wrong({**document, "spec": {**spec, "numNode": 2}}, fields)] == [".spec.numNode"]


def test_what_is_wrong_in_a_pod_is_found():
    container = {
        "name": "node",
        "imag": "ringcomm",
        "args": "python",
        "securityContext": {"runAsUser": "1"},
    }
    pod = {"spec": {"containers": [container, {"image": "ringcomm"}], "volumes": [{"name": "shm"}]}}
    of_first = (".imag", ".args", ".securityContext.runAsUser")
    expected = [f".spec.containers[0]{each}" for each in of_first]
    assert [*wrong(pod, POD)] == [*expected, ".spec.containers[1].name"]
    assert [*wrong({"spec": {}}, POD)] == [".spec.containers"]


def test_the_mpi_operator_knows_each_field():
    """Its own are those of its types, v2beta1; what is in a pod is Kubernetes'."""
    assert (MPIJOB["apiVersion"], MPIJOB["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = MPIJOB["spec"]
    own = {"slotsPerWorker", "sshAuthMountPath", "runPolicy", "mpiReplicaSpecs"}
    assert set(spec) == own
    assert set(spec["runPolicy"]) <= {"cleanPodPolicy", "backoffLimit"}
    assert set(spec["mpiReplicaSpecs"]) == {"Launcher", "Worker"}
    for replica in spec["mpiReplicaSpecs"].values():
        assert set(replica) == {"replicas", "restartPolicy", "template"}
        assert [*wrong(replica["template"], POD)] == []


def jobs():
    """Yield what starts ranks, how many there are to be, what a host runs, the folder of keys."""
    spec = MPIJOB["spec"]
    launcher, worker = (
        spec["mpiReplicaSpecs"][name]["template"]["spec"]["containers"][0]
        for name in ("Launcher", "Worker")
    )
    n = spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    yield launcher, n, worker, spec["sshAuthMountPath"]
    trainer, mpi = TRAINJOB["spec"]["trainer"], RUNTIME["spec"]["mlPolicy"]["mpi"]
    assert (TRAINJOB["spec"]["runtimeRef"]["kind"], TRAINJOB["spec"]["runtimeRef"]["name"]) == (
        RUNTIME["kind"],
        RUNTIME["metadata"]["name"],
    )
    assert trainer["numProcPerNode"] == mpi["numProcPerNode"]
    nodes = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
    node = nodes[0]["template"]["spec"]["template"]["spec"]["containers"][0]
    yield trainer, trainer["numNodes"] * trainer["numProcPerNode"], node, mpi["sshAuthMountPath"]


@pytest.mark.parametrize("job", [*jobs()], ids=["mpijob", "trainjob"])
def test_a_job_starts_what_is_in_the_image(job):
    launcher, n, host, keys = job
    words = [*launcher["command"], *launcher["args"]]
    assert words[:5] == ["mpirun", "--hostfile", "/etc/mpi/hostfile", "-np", str(n)]
    script = words[-1].removeprefix("/home/mpi/")
    assert (ROOT / script).is_file()
    assert f"COPY {Path(script).parts[0]} /home/mpi/" in DOCKERFILE
    [command] = host["args"]
    key, config = re.search(r"-f (\S+) && exec /usr/sbin/sshd -De -f (\S+)$", command).groups()
    assert f"HostKey {key}'" in DOCKERFILE
    assert f">{config}\n" in DOCKERFILE
    assert f"'Port {host['readinessProbe']['tcpSocket']['port']}'" in DOCKERFILE
    assert host["securityContext"]["runAsUser"] == int(re.search(r"--uid (\d+)", DOCKERFILE)[1])
    assert keys == "/home/mpi/.ssh"


def test_the_image_has_extras_that_exist_and_no_second_mpi():
    extras = re.search(r"^ARG EXTRAS=(\S+)$", DOCKERFILE, re.MULTILINE)[1].split(",")
    gpus = re.search(r"--build-arg EXTRAS=(\S+?)\.? ", DOCKERFILE)[1].split(",")
    for names in (extras, gpus):
        assert set(names) <= set(PROJECT["optional-dependencies"])
        assert "mpich" not in names


def test_the_conda_recipe_wants_what_pip_wants():
    recipe = yaml.safe_load((ROOT / "ci/conda/recipe.yaml").read_text())
    wanted = recipe["requirements"]
    build = wanted["build"][2:] + wanted["host"][2:]  # after compiler and libc, Python and pip
    assert {each.replace(" ", "") for each in wanted["run"][1:]} == set(PROJECT["dependencies"])
    assert {each.replace(" ", "") for each in build} == set(
        PROJECT["optional-dependencies"]["build"]
    )
    assert wanted["run_constraints"] == [
        each.replace("torch>", "pytorch >") for each in PROJECT["optional-dependencies"]["torch"]
    ]


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=str)
def test_workflows_run_what_is_there(path):
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    runs = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    named = {name for run in runs for name in re.findall(r"(?:\.?ci|examples)/[\w/.]*\w", run)}
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
