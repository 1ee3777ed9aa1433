"""A trainer that does one thing wrong: ``python -c FAKE how folder``."""

FAKE = """
import hashlib, json, sys, time
from pathlib import Path
how, root = sys.argv[1], Path(sys.argv[2])
(root / "alive").touch()
while not (root / "buffers" / "000001.npz").exists():
    time.sleep(0.01)
if how == "crash":
    raise RuntimeError("out of memory")
if how == "hang":
    time.sleep(1000)
data = bytearray((root / "base" / "model.safetensors").read_bytes())
start = 8 + int.from_bytes(data[:8], "little")  # tensors follow a JSON header
if how == "nan":
    data[start:] = b"\\xff" * (len(data) - start)
if how == "degraded":
    data[start:] = bytes(len(data) - start)  # finite, and useless
digest = hashlib.sha256(data).hexdigest()
if how == "truncated":
    data = data[:-100]
scratch = root / "versions" / ".new"
scratch.mkdir(parents=True)
(scratch / "model.safetensors").write_bytes(data)
for name in ("config.json", "draft_vocab.npy"):
    if (root / "base" / name).exists():
        (scratch / name).write_bytes((root / "base" / name).read_bytes())
facts = {"parent": 0, "samples": 1, "train_s": 0.0, "steps": 0, "losses": [0.0], "clipped": 0.0}
(scratch / "manifest.json").write_text(json.dumps({"version": 1, "sha256": digest, **facts}))
scratch.rename(root / "versions" / "v000001")
sys.stdin.read()
"""
