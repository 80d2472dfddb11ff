"""Generate the gRPC code from proto/penstock.proto, or check that what is committed is current.

    python scripts/generate_proto.py            write src/penstock/server/_generated
    python scripts/generate_proto.py --check    exit 1 if it would change

The compiler writes an absolute import of the message module as if it lay at the top of the path; it
is rewritten to the package, so that the code can be imported from where it is.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "proto" / "penstock.proto"
TARGET = ROOT / "src" / "penstock" / "server" / "_generated"
PACKAGE = "penstock.server._generated"
INIT = '"""Generated from proto/penstock.proto by scripts/generate_proto.py: do not edit."""\n'


def generate() -> dict[str, str]:
    """File name to content of everything that belongs into `TARGET`."""
    with tempfile.TemporaryDirectory() as folder:
        code = protoc.main(
            [
                "protoc",
                f"--proto_path={SOURCE.parent}",
                f"--python_out={folder}",
                f"--pyi_out={folder}",
                f"--grpc_python_out={folder}",
                SOURCE.name,
            ]
        )
        if code:
            raise SystemExit(code)
        files = {path.name: packaged(path.read_text("utf-8")) for path in Path(folder).iterdir()}
    return {"__init__.py": INIT, **files}


def packaged(text: str) -> str:
    return text.replace("import penstock_pb2 as", f"from {PACKAGE} import penstock_pb2 as")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare, write nothing")
    check: bool = parser.parse_args(arguments).check
    files = generate()
    present = {p.name: p.read_text("utf-8") for p in TARGET.iterdir() if p.is_file()}
    stale = sorted(name for name in files | present if files.get(name) != present.get(name))
    if check:
        for name in stale:
            print(f"error: {(TARGET / name).relative_to(ROOT)} is not current")
        return 1 if stale else 0
    for name in stale:
        if name in files:
            (TARGET / name).write_text(files[name], "utf-8")
        else:
            (TARGET / name).unlink()
    print(f"proto: {len(files)} files, {len(stale)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
