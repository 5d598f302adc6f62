"""How the ranks of a job are laid out: a box of data, pipeline and tensor parallelism.

Nothing here needs torch, so a mesh that does not fit is refused before anything slow is loaded.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hpcpace.errors import MeshError

DIMENSIONS = ("dp", "pp", "tp")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The sizes of the three dimensions, or the place of one rank in them.

    Ranks are numbered like the elements of an array of shape (dp, pp, tp) in C order: tensor parallelism, which
    communicates most, is innermost and so stays within a node where it can; data parallelism is outermost.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        """The number of ranks that the mesh needs."""
        return self.dp * self.pp * self.tp

    def coordinates(self, rank: int) -> Mesh:
        """Return the place of a rank in the mesh."""
        pipeline, tp = divmod(rank, self.tp)
        dp, pp = divmod(pipeline, self.pp)
        return Mesh(dp=dp, pp=pp, tp=tp)

    def rank(self, place: Mesh) -> int:
        """Return the rank at a place: the inverse of `coordinates`."""
        return (place.dp * self.pp + place.pp) * self.tp + place.tp

    def as_dict(self) -> dict[str, int]:
        """Return the numbers by the name of their dimension."""
        return asdict(self)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.as_dict().items())


def parse_mesh(text: str, world_size: int) -> Mesh:
    """Read a mesh like `dp=2,pp=2,tp=1`.

    A dimension that is not named is 1; no text at all means data parallelism over all ranks.

    Raises:
        MeshError: the text is not a mesh, or its product is not the number of ranks.
    """
    if not text.strip():
        return Mesh(dp=world_size)
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in DIMENSIONS or not (value.isascii() and value.isdigit()) or int(value) < 1:
            raise MeshError(f"mesh {text!r}: cannot read {part.strip()!r}; write sizes from 1 on, like dp=2,pp=2,tp=1")
        if name in sizes:
            raise MeshError(f"mesh {text!r} names {name} twice: write each of dp, pp and tp once")
        sizes[name] = int(value)
    mesh = Mesh(**sizes)
    if mesh.size != world_size:
        raise MeshError(
            f"mesh {mesh} needs {mesh.size} ranks, but the job has {world_size}: change the mesh or the number of ranks"
        )
    return mesh
