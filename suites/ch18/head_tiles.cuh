// Tiles of one head by TMA, for cuda_attention_hopper_tma.cu and cuda_attention_hopper.cu.

#include "../tma.cuh"

// Loads a tile of `map` (heads, tokens, 128) from a row and a column of `head`. Rows after the
// head's last row become zero. A two-dimensional map would load rows of the next head instead. A
// NaN there would reach this head, because a weight of zero times NaN is NaN.
__device__ inline void load_head_tile(void* tile, const CUtensorMap& map, int head, int row,
                                      int column, unsigned long long* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(tile)),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(shared_address(barrier))
      : "memory");
}
