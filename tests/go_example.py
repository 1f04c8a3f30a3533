"""The Go example, compiled with what protoc makes of proto/ and the packages of Debian (golang-go,
golang-google-grpc-dev, golang-google-protobuf-dev, protobuf-compiler, libprotobuf-dev): no module proxy is
asked. Package and source are made as docs/grpc.md says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEBIAN = "/usr/share/gocode"
PACKAGE = "github.com/tinsmith/tinsmith/gen/go/tinsmith/v1"
"""What protoc calls it unless told otherwise."""
_GENERATORS = (
    "google.golang.org/protobuf/cmd/protoc-gen-go",
    "google.golang.org/grpc/cmd/protoc-gen-go-grpc",
)
_CODEC = """// Debian's grpc is built on an older protobuf, which cannot read what protoc-gen-go makes now.
package main

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/protobuf/proto"
)

type codec struct{}

func (codec) Marshal(v interface{}) ([]byte, error)      { return proto.Marshal(v.(proto.Message)) }
func (codec) Unmarshal(data []byte, v interface{}) error { return proto.Unmarshal(data, v.(proto.Message)) }
func (codec) Name() string                               { return "proto" }

func init() { encoding.RegisterCodec(codec{}) }
"""


def can_be_built() -> bool:
    """Whether this machine has Go, protoc and Debian's packages."""
    packages = (Path(DEBIAN, "src", package).is_dir() for package in _GENERATORS)
    return all(shutil.which(program) for program in ("go", "protoc")) and all(packages)


def printed() -> str:
    """The commands of docs/grpc.md that make the package and the program's source, for this tree, without
    those that ask a module proxy."""
    (block,) = re.findall(
        r"^```bash\n(.*?)^```$", (ROOT / "docs" / "grpc.md").read_text(), re.MULTILINE | re.DOTALL
    )
    here, found = re.subn(r"^clone=.*$", f"clone={shlex.quote(str(ROOT))}", block, flags=re.MULTILINE)
    assert found == 1
    return "".join(line for line in here.splitlines(keepends=True) if not line.startswith("go "))


def go_example(directory: Path) -> Path:
    """The compiled program."""
    tools, source = directory / "bin", directory / "src" / "example.com" / "mine"
    for folder in (tools, source):
        folder.mkdir(parents=True)
    environment = {
        **os.environ,
        "GO111MODULE": "off",
        "GOPATH": f"{directory}:{DEBIAN}",
        "PATH": f"{tools}:{os.environ['PATH']}",
    }

    def execute(*command: str) -> None:
        done = subprocess.run(
            command, cwd=source, env=environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"

    for package in _GENERATORS:
        execute("go", "build", "-o", str(tools / package.rpartition("/")[2]), package)
    execute("bash", "-euc", printed())
    (source / "codec.go").write_text(_CODEC)
    execute("go", "build", "-o", str(directory / "train"), "example.com/mine")
    return directory / "train"
