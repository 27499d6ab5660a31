"""The C++ norms, rotary embedding, activation and cache write: close to fp64, and row by row."""

import pytest
import torch

from pdserve_kernels import cpu, reference

SIZES = [16, 80, 100, 1024, 2057]
HEAD_DIMS = [64, 80, 96, 128, 256]
# How far rounding to bf16 moves a number, relative to it.
ROUNDING = 2.0**-8


pytestmark = pytest.mark.usefixtures("each_isa")


def bf16(*shape):
    return torch.randn(shape).to(torch.bfloat16)


def assert_near(actual, exact, roundings=2.01):
    """Within so many roundings to bf16, of which a result has one or two."""
    error = (actual.double() - exact).abs()
    assert (error <= roundings * ROUNDING * exact.abs() + 1e-30).all(), error.max()


def norm_in_fp64(x, weight, eps):
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(size):
    torch.manual_seed(size)
    x, weight = bf16(9, size) * 3, bf16(size)
    normed = cpu.rms_norm(x, weight, 1e-6)
    assert_near(normed, norm_in_fp64(x, weight, 1e-6))
    for row in range(len(x)):
        assert torch.equal(cpu.rms_norm(x[row : row + 1], weight, 1e-6)[0], normed[row])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rms_norm_of_heads_within_wider_rows(head_dim):
    torch.manual_seed(head_dim)
    qkv, weight = bf16(7, 5, head_dim) * 3, bf16(head_dim)
    heads = qkv[:, 1:4]
    normed = cpu.rms_norm(heads, weight, 1e-6)
    assert_near(normed, norm_in_fp64(heads, weight, 1e-6))
    assert torch.equal(
        cpu.rms_norm(heads.contiguous().flatten(0, 1), weight, 1e-6).view_as(normed), normed
    )
    assert torch.equal(cpu.rms_norm(heads.transpose(0, 1), weight, 1e-6), normed.transpose(0, 1))


def test_rms_norm_takes_columns_and_nothing_at_all():
    weight, columns = bf16(64), bf16(64, 7).T
    assert torch.equal(
        cpu.rms_norm(columns, weight, 1e-5), cpu.rms_norm(columns.contiguous(), weight, 1e-5)
    )
    assert cpu.rms_norm(bf16(0, 5, 64), weight, 1e-5).shape == (0, 5, 64)


def test_rms_norm_refuses_a_weight_of_another_size():
    with pytest.raises(ValueError, match=r"weight is \(63,\)"):
        cpu.rms_norm(bf16(2, 64), bf16(63), 1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_fused_add_rms_norm_is_a_rounded_sum_and_its_norm(size):
    torch.manual_seed(size)
    x, residual, weight = bf16(6, size), bf16(6, size), bf16(size)
    before = residual.clone()
    normed, new_residual = cpu.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(new_residual, x + residual)
    assert torch.equal(normed, cpu.rms_norm(new_residual, weight, 1e-6))
    assert torch.equal(residual, before)


@pytest.mark.parametrize("width", [1, 15, 48, 3072])
def test_silu_and_mul(width):
    torch.manual_seed(width)
    x = bf16(5, 2 * width + 3)[:, : 2 * width] * 6
    gate, up = x.double().chunk(2, -1)
    # silu is rounded first, its product with `up` after that.
    assert_near(cpu.silu_and_mul(x), gate * gate.sigmoid() * up)


def test_silu_and_mul_of_extremes():
    gate = torch.tensor([-1e30, -200, -90, 0, 90, 1e30, torch.inf, torch.nan])
    x = torch.cat((gate, torch.ones(8)))[None].to(torch.bfloat16)
    result = cpu.silu_and_mul(x)[0].float()
    assert (result[:3].abs() < 1e-35).all()
    assert torch.equal(result[3:7], gate[3:7].to(torch.bfloat16).float())
    assert result[7].isnan()


def make_rotary(rot_dim):
    inverse = 10000.0 ** (-torch.arange(0, rot_dim, 2) / rot_dim)
    angle = torch.arange(4096)[:, None] * inverse
    return torch.cat((angle.cos(), angle.sin()), -1)


@pytest.mark.parametrize(
    ("head_dim", "rot_dim"), [*zip(HEAD_DIMS, HEAD_DIMS, strict=True), (16, 16), (128, 50)]
)
def test_rotary_embedding_rotates_slices_in_place(head_dim, rot_dim):
    torch.manual_seed(0)
    cache, positions = make_rotary(rot_dim), torch.randint(0, 4096, (11,))
    qkv = bf16(11, 7 * head_dim)
    before = qkv.clone()
    query, key, value = qkv.view(11, 7, head_dim).split((4, 2, 1), 1)
    cpu.rotary_embedding(positions, query, key, cache)
    half = rot_dim // 2
    cos, sin = (part[:, None] for part in cache[positions].double().chunk(2, -1))
    heads = before.view(11, 7, head_dim)[:, :6].double()
    first, second = heads[..., :half], heads[..., half:rot_dim]
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    rotated = torch.cat((query, key), 1)
    # Differences of products: errors are relative to these.
    error = (rotated[..., :rot_dim].double() - expected).abs()
    assert (error <= ROUNDING * expected.abs() + 1e-6 * heads.abs().max()).all()
    assert torch.equal(rotated[..., rot_dim:], before.view(11, 7, head_dim)[:, :6, rot_dim:])
    assert torch.equal(value, before.view(11, 7, head_dim)[:, 6:])


def test_rotary_embedding_refuses_other_counts_of_tokens():
    with pytest.raises(ValueError, match="must have 4 tokens"):
        cpu.rotary_embedding(
            torch.zeros(4, dtype=torch.int64), bf16(4, 2, 16), bf16(3, 2, 16), make_rotary(16)
        )


@pytest.mark.parametrize(("position", "message"), [(4096, "7 to 4096"), (-1, "-1 to 7")])
def test_rotary_embedding_refuses_positions_without_angles(position, message):
    heads = bf16(2, 2, 16)
    before = heads.clone()
    with pytest.raises(ValueError, match=rf"positions are {message}, must be in \[0, 4096\)"):
        cpu.rotary_embedding(torch.tensor([7, position]), heads, heads, make_rotary(16))
    assert torch.equal(heads, before)


def unpack(kv_cache):
    """Tiles as [block_size, head_dim], number by number from the definition of the format."""
    block_size, head_dim = kv_cache.shape[-2:]
    position, dim = torch.meshgrid(torch.arange(block_size), torch.arange(head_dim), indexing="ij")
    in_keys = position // 16 * 16 * head_dim + dim // 2 * 32 + position % 16 * 2 + dim % 2
    in_values = position // 2 * 2 * head_dim + dim * 2 + position % 2
    tiles = kv_cache.flatten(-2)
    return torch.stack((tiles[..., 0, :][..., in_keys], tiles[..., 1, :][..., in_values]), -3)


@pytest.mark.parametrize(
    ("block_size", "head_dim"),
    [(16, 16), (16, 128), (16, 256), (32, 80), (48, 96), (64, 64), (128, 256)],
)
def test_the_cache_holds_what_the_reference_writes_in_packed_tiles(block_size, head_dim):
    torch.manual_seed(0)
    assert cpu.kv_tile_format(torch.bfloat16, block_size, head_dim) == "vnni16"
    shape = (6, 3, 2, 2, block_size, head_dim)
    packed, row_major = (torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in range(2))
    # A gap between tokens and one between heads; two tokens are padding.
    key, value = bf16(40, 4, head_dim)[:, :3], bf16(40, 3, 2 * head_dim)[..., :head_dim]
    slots = torch.randperm(6 * block_size)[:40]
    slots[[3, 17]] = -1
    cpu.reshape_and_cache(key, value, packed, 1, slots)
    reference.reshape_and_cache(key, value, row_major, 1, slots)
    assert torch.equal(unpack(packed).nan_to_num(7.0), row_major.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("dtype", "block_size", "head_dim"),
    [(torch.float32, 16, 64), (torch.bfloat16, 8, 64), (torch.bfloat16, 16, 72)],
)
def test_other_tiles_are_row_major(dtype, block_size, head_dim):
    assert cpu.kv_tile_format(dtype, block_size, head_dim) == "row_major"
    caches = [torch.zeros(2, 1, 1, 2, block_size, head_dim, dtype=dtype) for _ in range(2)]
    key, value = torch.randn(2, 3, 1, head_dim).to(dtype)
    for kernels, cache in zip((cpu, reference), caches, strict=True):
        kernels.reshape_and_cache(key, value, cache, 0, torch.tensor([0, 5, block_size]))
    assert torch.equal(*caches)


def test_the_cache_write_refuses_other_shapes_and_dtypes():
    cache, slots = torch.zeros(2, 2, 1, 2, 16, 32, dtype=torch.bfloat16), torch.arange(3)
    with pytest.raises(ValueError, match=r"value must be \(3, 2, 32\)"):
        cpu.reshape_and_cache(bf16(3, 2, 32), bf16(3, 2, 31), cache, 0, slots)
    with pytest.raises(ValueError, match=r"key must be .*float32"):
        cpu.reshape_and_cache(torch.zeros(3, 2, 32), bf16(3, 2, 32), cache, 0, slots)
    for slot in (32, -2):
        elsewhere = torch.tensor([0, slot, 2])
        with pytest.raises(ValueError, match=r"slots are .*, must be in \[-1, 32\)"):
            cpu.reshape_and_cache(bf16(3, 2, 32), bf16(3, 2, 32), cache, 0, elsewhere)
    assert not cache.any()
    with pytest.raises(ValueError, match=r"layer must be in \[0, 1\), got 1"):
        cpu.reshape_and_cache(bf16(3, 2, 32), bf16(3, 2, 32), cache, 1, slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_have_the_reference_s_bits(dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 96).to(dtype), torch.rand(96).to(dtype)
    assert torch.equal(cpu.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    assert torch.equal(cpu.silu_and_mul(x), reference.silu_and_mul(x))
    for ours, theirs in zip(
        cpu.fused_add_rms_norm(x, x, weight, 1e-6),
        reference.fused_add_rms_norm(x, x, weight, 1e-6),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
