"""Synthetic packs: seeded, with the byte rules and the file layout of published packs, on disk or without
files.

Called by `flashnext-drv synth`, the engine (a SynthPack stands where a Pack would), tests and benches.  What
must stay true: every byte is a function of (model, seed, knobs, tensor name, index) by the rules of fill.py,
so what `write` puts on disk, what `read` returns and what kernel synth_fill makes from `fill_plan` are the
same bytes.

Numbers keep activations sane: suh is near gain / (rms(codebook) sqrt(K)) and svh near 1 with random signs,
plain matrices have std near gain / sqrt(K), norms std 0.14 around their neutral value.  Source: exl3.md
section 12.

Locality.  Real routers prefer, for a while, experts they have just used.  Here that comes from recurrent
state: most DeltaNet heads forget slowly (A_log, dt_bias), their outputs are large beside the small
embeddings, and two rules are scaled by `locality` in [0, 1].  Embeddings are sqrt(locality) of one vector
that all tokens share and sqrt(1 - locality) of their own, so that keys and queries of different tokens agree
and a head's output is a slow average of past values; a router's rows are the same mixture inside groups of
experts (as many as a token uses, rounded up to a power of two), so that a group comes and goes together.  It
is a model of locality, not a measurement of a real one; the shared vector also makes some groups more
popular than others for good.

# measured: share of a token's experts that an earlier token used too, by distance 1, 4, 16, 64 tokens; tiny
# (4 of 16 experts, chance 0.25), random ids, FP64 reference: locality 0: 0.28 0.28 0.26 0.25; 0.5: 0.39 0.38
# 0.36 0.31; 0.75: 0.53 0.49 0.44 0.38; 1: 0.89 0.88 0.87 0.86.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import isqrt, prod
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import CapacityError, UsageError
from . import fill
from .config import ModelConfig
from .fill import FillRule
from .header import DTYPE_BYTES, Tensor
from .inventory import Need, mtp_needs, text_needs
from .pack import PackBase
from .synth_models import MODELS, SynthModel
from .weight import MARKERS

__all__ = ["SynthPack"]

_VERSION: Final = 1
_WRITE_BYTES: Final = 1 << 22
_NGRAM_FILE: Final = "ngram_embedding.safetensors"
_PATCH_FILE: Final = "mtp_hyper_connection_mixer_patch.safetensors"
# All 27 pairs of width and codebook, in the order in which --mixed deals them out.
_MIXED: Final = tuple(
    (bits, book) for bits in (1, 2, 3, 4, 5, 6, 7, 8) for book in ("mul1", "mcg", "3inst")
) + ((1.5, "mul1"), (2.5, "mul1"), (3.5, "mul1"))
# 1 / rms of each codebook, in 2^-16.
_INVERSE_RMS: Final[Mapping[str, int]] = {"3inst": 52694, "mcg": 52677, "mul1": 65516}

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class _Content:
    """What a tensor holds: bytes by rule, or few constant bytes."""

    rule: FillRule | None
    constant: bytes = b""


class SynthPack(PackBase):
    """A pack that exists as rules.  Same interface as Pack; Tensor.offset counts from the first data byte of
    its file.

    model: "micro", "tiny", "quarter" or "full".  seed: any integer >= 0.  locality: 0..1, see above.
    mixed: deal all widths and codebooks out over the linears, some plain ones and legacy sign words among
    them, and store the n-gram table in one piece.  ngram_rows: about as many rows for the table (its head
    structure stays). Raises UsageError.
    """

    def __init__(
        self,
        model: str,
        seed: int = 0,
        *,
        locality: float = 0.5,
        mixed: bool = False,
        ngram_rows: int | None = None,
    ) -> None:
        super().__init__()
        if model not in MODELS:
            raise UsageError(
                "there is no such synthetic model", model=model, do=f"use one of {', '.join(MODELS)}"
            )
        if not 0.0 <= locality <= 1.0:
            raise UsageError("locality is out of range", locality=locality, do="use 0..1")
        if seed < 0:
            raise UsageError("seed is negative", seed=seed, do="use an integer >= 0")
        self.model: SynthModel = MODELS[model]
        self.seed, self.locality, self.mixed = seed, locality, mixed
        self.config_json = self.model.config_json(ngram_rows)
        self.config = ModelConfig.from_json(self.config_json, source=f"synthetic {model}")
        self.tensors = {}
        self._contents: dict[str, _Content] = {}
        self._dealt = {True: 0, False: 0}  # experts' linears and the others, so that all meet all widths
        # own^2 + shared^2 = 128^2: mixing keeps the size of the numbers
        self._shared = isqrt(round(locality * 1024) * 16)
        self._own = isqrt(128 * 128 - self._shared * self._shared)
        self._files: dict[str, list[Tensor]] = {}
        self._make()

    @property
    def where(self) -> str:
        return f"synthetic {self.model.name}, seed {self.seed}"

    def digest(self) -> str:
        """SHA-256 of the recipe; a written pack's digest is that of its files."""
        recipe = {
            "format": _VERSION,
            "model": self.model.name,
            "seed": self.seed,
            "shared": self._shared,
            "mixed": self.mixed,
            "ngram_base": self.config.ngram_base,
        }
        return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()

    def fill_plan(self, name: str) -> FillRule | None:
        """The rule kernel synth_fill can make this tensor by; None for the few that only read() gives."""
        self.tensor(name)
        return self._contents[name].rule

    def read_into(self, name: str, dest: npt.NDArray[np.uint8], first: int = 0) -> None:
        self.require_range(name, dest, first)
        content = self._contents[name]
        if content.rule is None:
            dest[:] = np.frombuffer(content.constant, dtype=np.uint8)[first:][: dest.size]
        else:
            fill.fill_into(content.rule, dest, first)

    def write(self, folder: str | Path, progress: Progress | None = None) -> None:
        """Write the pack's files into `folder`, which must be empty or absent.

        progress: called with (file name, bytes done, bytes in all), from several threads.
        Raises UsageError when the folder holds something, CapacityError when the disk cannot hold the pack.
        """
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(
                "the folder for the pack is not empty", folder=str(folder), do="give a new folder"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(json.dumps(self.config_json, indent=1) + "\n")
            (folder / "model.safetensors.index.json").write_text(json.dumps(self._index()) + "\n")
            total, done = sum(t.size for t in self.tensors.values()), [0]

            def told(name: str, size: int) -> None:
                done[0] += size
                if progress is not None:
                    progress(name, done[0], total)

            with ThreadPoolExecutor(max_workers=4) as pool:
                for future in [
                    pool.submit(self._write_file, folder / name, i, told)
                    for i, name in enumerate(self._files)
                ]:
                    future.result()
        except OSError as error:
            raise CapacityError(
                "the pack cannot be written",
                folder=str(folder),
                because=str(error.strerror),
                do="give a folder on a disk with room; inspect or remove what is there now",
            ) from error

    def _write_file(self, file: Path, i_file: int, told: Callable[[str, int], None]) -> None:
        header: dict[str, object] = {}
        if file.name == _NGRAM_FILE:
            header["__metadata__"] = self._ngram_metadata()
        for tensor in self._files[file.name]:
            header[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [tensor.offset, tensor.offset + tensor.size],
            }
        raw = json.dumps(header, separators=(",", ":")).encode()
        # The table's file keeps its header a multiple of 8, the others put their data at odd places on
        # purpose.
        want = 0 if file.name == _NGRAM_FILE else (1, 6, 3, 5)[i_file % 4]
        raw += b" " * ((want - len(raw)) % 8)
        buffer = np.empty(_WRITE_BYTES, dtype=np.uint8)
        with open(file, "wb") as stream:
            stream.write(len(raw).to_bytes(8, "little") + raw)
            for tensor in self._files[file.name]:
                for first in range(0, tensor.size, _WRITE_BYTES):
                    piece = buffer[: min(_WRITE_BYTES, tensor.size - first)]
                    self.read_into(tensor.name, piece, first)
                    stream.write(piece.data)
                    told(file.name, piece.size)

    def _index(self) -> dict[str, object]:
        shards = [name for name in self._files if name.startswith("model-")]
        return {
            "metadata": {"total_size": sum(t.size for name in shards for t in self._files[name])},
            "weight_map": {t.name: name for name in shards for t in self._files[name]},
        }

    def _ngram_metadata(self) -> dict[str, str]:
        info = self.ngram()
        meta = {
            "format": "exl3_ngram_trellis",
            "version": "1",
            "K": str(info.codec),
            "codebook": "mul1",
            "codebook_scale": "random",
            "row_dim": str(info.row_dim),
            "rows": str(info.rows),
            "source": "synthetic",
        }
        return meta if self.mixed else meta | {"shard_rows": str(info.sources[0][2])}

    def _make(self) -> None:
        """Lay out every tensor: layers to shards, table and MTP mixer to their own files."""
        mixer = self.config.names.mtp_mixer
        units: list[list[tuple[str, str, tuple[int, ...], _Content]]] = [[]]
        patch: list[tuple[str, str, tuple[int, ...], _Content]] = []
        before = ""
        for need in (*text_needs(self.config), *mtp_needs(self.config)):
            unit = _unit(need.name)
            if unit != before:
                units.append([])
                before = unit
            (patch if need.name.startswith(mixer) else units[-1]).extend(self._tensors(need))
        sizes = [sum(prod(shape) * DTYPE_BYTES[dtype] for _, dtype, shape, _ in unit) for unit in units]
        limit = self.model.shard_bytes or -(-sum(sizes) // 2)
        shards: list[list[tuple[str, str, tuple[int, ...], _Content]]] = [[]]
        filled = 0
        for unit_tensors, size in zip(units, sizes, strict=True):
            if filled and filled + size > limit:
                shards.append([])
                filled = 0
            shards[-1].extend(unit_tensors)
            filled += size
        for i, shard in enumerate(shards):
            self._place(f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors", shard)
        self._place(_NGRAM_FILE, list(self._ngram_tensors()))
        if patch:
            self._place(_PATCH_FILE, patch)

    def _place(self, file: str, tensors: list[tuple[str, str, tuple[int, ...], _Content]]) -> None:
        at, path, placed = 0, Path(file), []
        for name, dtype, shape, content in tensors:
            size = prod(shape) * DTYPE_BYTES[dtype]
            placed.append(Tensor(name, path, dtype, shape, at, size))
            self.tensors[name] = placed[-1]
            self._contents[name] = content
            at += size
        self._files[file] = placed

    def _tensors(self, need: Need) -> Iterator[tuple[str, str, tuple[int, ...], _Content]]:
        if not need.k:
            dtype, rule = self._vector(need)
            yield need.name, dtype, need.shape, _Content(rule)
            return
        bits: float = self.model.bits.get(need.role, 0)
        book, plain = "mul1", need.role not in self.model.bits
        expert = need.role.startswith("expert.")
        i_linear = self._dealt[expert]
        if not plain:
            self._dealt[expert] += 1
            if self.mixed:
                bits, book = _MIXED[(5 * i_linear + 3) % len(_MIXED)]
                plain = need.role in ("gdn.z", "qsa.k") and i_linear % 2 == 0
        if plain:
            bf16 = self.mixed and need.role == "qsa.k"
            name = f"{need.name}.weight"
            yield name, "BF16" if bf16 else "F16", (need.n, need.k), _Content(self._matrix(need, name, bf16))
            return
        shape = (need.k // 16, need.n // 16, int(16 * bits))
        yield f"{need.name}.trellis", "I16", shape, _Content(fill.words(self._key(f"{need.name}.trellis")))
        low = isqrt((_INVERSE_RMS[book] * self.model.gain(need.role)) ** 2 // need.k)  # 2^-16
        yield (
            f"{need.name}.suh",
            "F16",
            (need.k,),
            _Content(
                fill.signed(
                    self._key(f"{need.name}.suh"), _f16_bits(low * 7 // 10), _f16_bits(low * 13 // 10)
                )
            ),
        )
        if self.mixed and i_linear % 29 == 11:
            yield (
                f"{need.name}.sv",
                "I16",
                (need.n // 16,),
                _Content(fill.words(self._key(f"{need.name}.sv"))),
            )
        else:
            svh = fill.signed(self._key(f"{need.name}.svh"), _f16_bits(45875), _f16_bits(85197))  # 0.7 .. 1.3
            yield f"{need.name}.svh", "F16", (need.n,), _Content(svh)
        if book != "3inst":
            yield f"{need.name}.{book}", "I32", (), _Content(None, MARKERS[book].to_bytes(4, "little"))

    def _vector(self, need: Need) -> tuple[str, FillRule]:
        """(dtype, rule) of a tensor that is no linear."""
        key, role = self._key(need.name), need.role
        if role == "embed":
            shared = self._key(f"{need.name}/shared")
            return "BF16", fill.bell(
                key,
                7,
                bf16=True,
                own=self._own,
                shared=self._shared,
                key2=shared,
                cols=need.shape[1],
                group_rows=need.shape[0],
            )
        if role == "gdn.a_log":
            return "BF16", fill.uniform(key, 5, bf16=True, first=-128, count=112)  # -4 .. -0.5
        if role == "gdn.dt_bias":
            return "BF16", fill.uniform(key, 5, bf16=True, first=-128, count=96)  # -4 .. -1
        if role == "gdn.norm":
            return "BF16", fill.bell(key, 7, bf16=True, shift=1, add=128)  # near 1
        wide = need.shape == (self.config.n_streams * self.config.hidden,)
        f16 = role in ("site.norm", "ple.conv") or (role == "mtp.norm" and wide)
        k = 7 if role in ("gdn.conv", "ple.conv") else 8
        return "F16" if f16 else "BF16", fill.bell(key, k, bf16=not f16)

    def _matrix(self, need: Need, name: str, bf16: bool) -> FillRule:
        """A plain matrix with std gain / sqrt(K); a router's rows share inside groups of experts."""
        gain = self.model.gain(need.role)
        square, k = 1369 * need.k, 0  # (37 sqrt(K))^2: the bell has std 37
        while (1 << (2 * k + 1)) * gain * gain <= square:
            k += 1
        if need.role != "router":
            return fill.bell(self._key(name), k, bf16=bf16)
        group = 1
        while group < self.config.n_active:
            group *= 2
        return fill.bell(
            self._key(name),
            k,
            bf16=bf16,
            own=self._own,
            shared=self._shared,
            key2=self._key(f"{name}/shared"),
            cols=need.k,
            group_rows=group,
        )

    def _ngram_tensors(self) -> Iterator[tuple[str, str, tuple[int, ...], _Content]]:
        config = self.config
        stem = config.names.ngram(config.ple_layers[0])
        made = config.ngram()
        bits = 3 if self.mixed else self.model.ngram_bits
        n_words = 1 + bits * config.ngram_row_dim // 16
        bias = fill.bell(self._key(f"{stem}.head_bias"), 13, bf16=False)
        yield f"{stem}.head_bias", "F16", (config.n_ngram_heads, config.ngram_row_dim), _Content(bias)
        for part, values in (
            ("head_offsets", made.offsets),
            ("head_vocab_sizes", made.sizes),
            ("layer_multipliers", made.multipliers),
        ):
            raw = np.array(values, dtype="<i8").tobytes()
            yield f"{stem}.{part}", "I64", (len(values),), _Content(None, raw)
        if self.mixed:
            yield (
                f"{stem}.trellis",
                "I16",
                (made.rows, n_words),
                _Content(fill.rows(self._key(stem), n_words)),
            )
            return
        shard_rows = -(-made.rows // config.ngram_parts)
        for i in range(config.ngram_parts):
            name = f"{stem}.shard_{i}.trellis"
            shape = (min(shard_rows, made.rows - i * shard_rows), n_words)
            yield name, "I16", shape, _Content(fill.rows(self._key(name), n_words))

    def _key(self, name: str) -> int:
        return fill.tensor_key(self.seed, name)


def _unit(name: str) -> str:
    """What published packs never split over two shards: a layer, or a module outside the layers."""
    parts = name.split(".")
    if "layers" in parts:
        return ".".join(parts[: parts.index("layers") + 2])
    return parts[0] if parts[0] == "mtp" else ".".join(parts[:3])


def _f16_bits(value: int) -> int:
    """f16 bits of value * 2^-16, rounded down; value in 4 .. 2^31."""
    e = value.bit_length() - 1
    return (e - 16 + 15) << 10 | ((value << 10 >> e) & 0x3FF)
