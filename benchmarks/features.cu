// One kernel per feature, compiled alone with -DPROBE_<feature>, to see whether an arch has it.
//
// cp_async: cp.async, a copy from global to shared memory that the thread does not wait for.
// ldmatrix: ldmatrix, 8 x 8 tiles from shared memory to the registers of a warp.
// stmatrix: stmatrix, the way back.
// mbarrier: mbarrier with a wait on its phase.
// elect: elect.sync, one leader of a warp.
// griddepcontrol: griddepcontrol, programmatic dependent launch.
// setmaxnreg: setmaxnreg, registers moved between the warpgroups of a block.
// redux_f32: redux.sync.max.f32, a warp's maximum of floats in one instruction.
// f32x2: fma.rn.f32x2, two fp32 multiply-adds in one instruction.
// wide_loads: ld.global.v8.b32, 32 bytes a thread in one load.
// bulk_copy: cp.async.bulk, contiguous bytes through the copy engine.
// tma: cp.async.bulk.tensor, a tile of a tensor through the copy engine.
// tma_gather: cp.async.bulk.tensor with tile::gather4, four rows of a tensor by index.
// tensormap_replace: tensormap.replace, a tensor map edited on the GPU.
// clusters: barrier.cluster, thread blocks that run side by side and can wait for each other.
// dsmem: mapa and ld.shared::cluster, the shared memory of another block of the cluster.
// st_async: st.async, a store to the shared memory of another block that reports to an mbarrier.
// multicast: cp.async.bulk and .tensor with .multicast::cluster, one read for several blocks.
// clc: clusterlaunchcontrol.try_cancel, a running block takes the place of a later one.
// clc_multicast: the same with .multicast::cluster::all: every block of the cluster gets the answer.
// multimem: multimem.ld_reduce, a sum over several GPUs made by the switch.
// fp8: mma.sync on e4m3.
// fp4: cvt to e2m1, four-bit floats.
// mma_block_scale: mma.sync with block_scale on e2m1, NVFP4 in the warp's tensor core.
// wgmma: wgmma.mma_async, the tensor core of Hopper for a warpgroup.
// tmem: tcgen05.alloc, st and ld: tensor memory.
// tcgen05: tcgen05.mma on bf16, the tensor core of data-center Blackwell.
// tcgen05_int8: tcgen05.mma with kind::i8.
// tcgen05_block_scale: tcgen05.mma with block_scale on e2m1, NVFP4 through tensor memory.
// two_cta: tcgen05.alloc with cta_group::2, tensor memory and tensor core of a pair of blocks.
//
// Each kernel is launched as two blocks of 128 threads. A block writes 1 if the instruction did
// what it should, and 2 if not. In a launch, `map` is null, so code in `if (map)` does not run.

#define PROBE extern "C" __global__ void
#define CLUSTER extern "C" __global__ void __cluster_dims__(2, 1, 1)

typedef unsigned long long u64;

__device__ alignas(128) unsigned source[8] = {1, 2, 3, 4, 5, 6, 7, 8};

__device__ unsigned at(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }

__device__ bool first_warp() { return threadIdx.x < 32; }

// Writes the answer of a block: 1 if `right` is true in all threads, else 2.
__device__ void answer(unsigned* out, bool right) {
  const bool all = __syncthreads_and(right);
  if (threadIdx.x == 0) out[blockIdx.x] = all ? 1 : 2;
}

__device__ void open_barrier(u64* barrier, unsigned bytes) {
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (bytes)
      asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1; }" ::"r"(
                       at(barrier)),
                   "r"(bytes)
                   : "memory");
  }
  __syncthreads();
}

// Waits for at most about a second, so a probe always ends.
__device__ bool arrived(u64* barrier) {
  unsigned done = 0;
  const long long end = clock64() + (1ll << 31);
  while (!done && clock64() < end)
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], 0;"
        "  selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(at(barrier))
        : "memory");
  return done;
}

__device__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

__device__ unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ unsigned in_other_block(const void* shared) {
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(at(shared)), "r"(cluster_rank() ^ 1));
  return there;
}

// Writes 128 x 32 bytes of `word`. All elements are equal, so the layout does not matter.
__device__ void fill(unsigned* tile, unsigned word) {
  for (unsigned i = threadIdx.x; i < 1024; i += blockDim.x) tile[i] = word;
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
}

#ifdef PROBE_cp_async
PROBE probe(unsigned* out, const void* map) {
  __shared__ alignas(16) unsigned tile[4];
  if (threadIdx.x == 0)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16; cp.async.wait_all;" ::"r"(at(tile)),
                 "l"(source)
                 : "memory");
  __syncthreads();
  answer(out, tile[3] == 4);
}
#endif

#ifdef PROBE_ldmatrix
PROBE probe(unsigned* out, const void* map) {
  __shared__ alignas(128) unsigned tile[1024];
  unsigned found;
  fill(tile, 7);
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(found)
               : "r"(at(tile) + threadIdx.x % 8 * 16));
  answer(out, found == 7);
}
#endif

#ifdef PROBE_stmatrix
PROBE probe(unsigned* out, const void* map) {
  __shared__ alignas(128) unsigned tile[1024];
  fill(tile, 0);
  if (first_warp())
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(at(tile) +
                                                                              threadIdx.x % 8 * 16),
                 "r"(7)
                 : "memory");
  __syncthreads();
  answer(out, tile[31] == 7);
}
#endif

#ifdef PROBE_mbarrier
PROBE probe(unsigned* out, const void* map) {
  __shared__ u64 barrier;
  unsigned done = 0;
  open_barrier(&barrier, 0);
  if (threadIdx.x == 0)
    asm volatile("{ .reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0]; }" ::"r"(at(&barrier))
                 : "memory");
  for (unsigned tries = 0; !done && tries < 1000; ++tries)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;"
        "  selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(at(&barrier))
        : "memory");
  answer(out, done);
}
#endif

#ifdef PROBE_elect
PROBE probe(unsigned* out, const void* map) {
  unsigned leader;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
               : "=r"(leader));
  answer(out, __popc(__ballot_sync(0xffffffff, leader)) == 1);
}
#endif

#ifdef PROBE_griddepcontrol
PROBE probe(unsigned* out, const void* map) {
  asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;" ::: "memory");
  answer(out, true);
}
#endif

#ifdef PROBE_setmaxnreg
PROBE __maxnreg__(128) probe(unsigned* out, const void* map) {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
  answer(out, true);
}
#endif

#ifdef PROBE_redux_f32
PROBE probe(unsigned* out, const void* map) {
  float most;
  asm volatile("redux.sync.max.f32 %0, %1, 0xffffffff;"
               : "=f"(most)
               : "f"((float)(threadIdx.x % 32)));
  answer(out, most == 31.0f);
}
#endif

#ifdef PROBE_f32x2
PROBE probe(unsigned* out, const void* map) {
  float low, high;
  asm volatile(
      "{ .reg .b64 a, b, c; mov.b64 a, {%2, %3}; mov.b64 b, {%3, %2}; mov.b64 c, {%2, %2};"
      "  fma.rn.f32x2 a, a, b, c; mov.b64 {%0, %1}, a; }"
      : "=f"(low), "=f"(high)
      : "f"(2.0f), "f"(3.0f));
  answer(out, low == 8.0f && high == 8.0f);
}
#endif

#ifdef PROBE_wide_loads
PROBE probe(unsigned* out, const void* map) {
  unsigned x[8];
  asm volatile("ld.global.v8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]), "=r"(x[4]), "=r"(x[5]), "=r"(x[6]),
                 "=r"(x[7])
               : "l"(source));
  answer(out, x[0] == 1 && x[7] == 8);
}
#endif

#ifdef PROBE_bulk_copy
PROBE probe(unsigned* out, const void* map) {
  __shared__ alignas(16) unsigned tile[4];
  __shared__ u64 barrier;
  open_barrier(&barrier, 16);
  if (threadIdx.x == 0)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 16, [%2];" ::
            "r"(at(tile)),
        "l"(source), "r"(at(&barrier))
        : "memory");
  answer(out, arrived(&barrier) && tile[3] == 4);
}
#endif

#ifdef PROBE_tma
PROBE probe(unsigned* out, const void* map) {
  __shared__ alignas(128) unsigned tile[1024];
  __shared__ u64 barrier;
  if (map) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %2}], [%3];" ::"r"(at(tile)),
        "l"(map), "r"(0), "r"(at(&barrier))
        : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %1}], [%2];"
        " cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::"l"(map),
        "r"(0), "r"(at(tile))
        : "memory");
  }
}
#endif

#ifdef PROBE_tma_gather
PROBE probe(unsigned* out, const void* map) {
  __shared__ alignas(128) unsigned tile[1024];
  __shared__ u64 barrier;
  if (map)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %2, %2, %2, %2}], [%3];" ::"r"(at(tile)),
        "l"(map), "r"(0), "r"(at(&barrier))
        : "memory");
}
#endif

#ifdef PROBE_tensormap_replace
PROBE probe(unsigned* out, const void* map) {
  __shared__ alignas(128) unsigned copy[32];
  if (map)
    asm volatile(
        "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(at(copy)),
        "l"(source)
        : "memory");
}
#endif

#ifdef PROBE_clusters
CLUSTER probe(unsigned* out, const void* map) {
  unsigned blocks;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  cluster_sync();
  answer(out, blocks == 2);
}
#endif

#ifdef PROBE_dsmem
CLUSTER probe(unsigned* out, const void* map) {
  __shared__ unsigned mine;
  unsigned theirs;
  if (threadIdx.x == 0) mine = cluster_rank();
  cluster_sync();
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(theirs) : "r"(in_other_block(&mine)));
  cluster_sync();
  answer(out, theirs == (cluster_rank() ^ 1));
}
#endif

#ifdef PROBE_st_async
CLUSTER probe(unsigned* out, const void* map) {
  __shared__ unsigned mine;
  __shared__ u64 barrier;
  open_barrier(&barrier, 4);
  cluster_sync();
  if (threadIdx.x == 0)
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
            in_other_block(&mine)),
        "r"(7), "r"(in_other_block(&barrier))
        : "memory");
  const bool right = arrived(&barrier) && mine == 7;
  cluster_sync();
  answer(out, right);
}
#endif

#ifdef PROBE_multicast
CLUSTER probe(unsigned* out, const void* map) {
  __shared__ alignas(128) unsigned tile[1024];
  __shared__ u64 barrier;
  const unsigned short both = 3;
  open_barrier(&barrier, 16);
  cluster_sync();
  if (map)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %2}], [%3], %4;" ::"r"(at(tile)),
        "l"(map), "r"(0), "r"(at(&barrier)), "h"(both)
        : "memory");
  else if (cluster_rank() == 0 && threadIdx.x == 0)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1], 16, [%2], %3;" ::"r"(at(tile)),
        "l"(source), "r"(at(&barrier)), "h"(both)
        : "memory");
  const bool right = arrived(&barrier) && tile[3] == 4;
  cluster_sync();
  answer(out, right);
}
#endif

#ifdef PROBE_clc
PROBE probe(unsigned* out, const void* map) {
  __shared__ alignas(16) unsigned reply[4];
  __shared__ u64 barrier;
  open_barrier(&barrier, 16);
  if (threadIdx.x == 0)
    asm volatile(
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128"
        " [%0], [%1];" ::"r"(at(reply)),
        "r"(at(&barrier))
        : "memory");
  const bool replied = arrived(&barrier);
  unsigned canceled;
  asm volatile(
      "{ .reg .b128 r; .reg .pred p; ld.shared.b128 r, [%1];"
      "  clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, r; selp.u32 %0, 1, 0, p; }"
      : "=r"(canceled)
      : "r"(at(reply)));
  answer(out, replied && canceled <= 1);
}
#endif

#ifdef PROBE_clc_multicast
PROBE probe(unsigned* out, const void* map) {
  __shared__ alignas(16) unsigned reply[4];
  __shared__ u64 barrier;
  open_barrier(&barrier, 16);
  if (threadIdx.x == 0)
    asm volatile(
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
        ".multicast::cluster::all.b128 [%0], [%1];" ::"r"(at(reply)),
        "r"(at(&barrier))
        : "memory");
  answer(out, arrived(&barrier));
}
#endif

#ifdef PROBE_multimem
PROBE probe(unsigned* out, const void* map) {
  float sum;
  if (map) {
    asm volatile("multimem.ld_reduce.weak.global.add.f32 %0, [%1];"
                 : "=f"(sum)
                 : "l"(map)
                 : "memory");
    *out = (unsigned)sum;
  }
}
#endif

#ifdef PROBE_fp8
PROBE probe(unsigned* out, const void* map) {
  float d[4] = {};
  const unsigned ones = 0x38383838;
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4},"
      " {%4, %4}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(ones));
  answer(out, d[0] == 32.0f);
}
#endif

#ifdef PROBE_fp4
PROBE probe(unsigned* out, const void* map) {
  unsigned pair;
  asm volatile("{ .reg .b8 b; cvt.rn.satfinite.e2m1x2.f32 b, %1, %2; cvt.u32.u8 %0, b; }"
               : "=r"(pair)
               : "f"(1.0f), "f"(2.0f));
  answer(out, pair == 0x24);
}
#endif

#ifdef PROBE_mma_block_scale
PROBE probe(unsigned* out, const void* map) {
  float d[4] = {};
  const unsigned ones = 0x22222222, scales = 0x38383838;
  const unsigned short first = 0;
  asm volatile(
      "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1"
      ".f32.ue4m3 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4}, {%0, %1, %2, %3},"
      " {%5}, {%6, %6}, {%5}, {%6, %6};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(ones), "r"(scales), "h"(first));
  answer(out, d[0] == 64.0f);
}
#endif

#ifdef PROBE_wgmma
PROBE probe(unsigned* out, const void* map) {
  __shared__ alignas(128) unsigned tile[1024];
  float d[4] = {};
  fill(tile, 0x3f803f80);  // ones in bf16
  const u64 ones = (at(tile) >> 4 & 0x3fff) | 8ull << 16 | 16ull << 32;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(ones)
      : "memory");
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
  answer(out, d[0] == 16.0f);
}
#endif

#if defined PROBE_tcgen05 || defined PROBE_tcgen05_int8 || defined PROBE_tcgen05_block_scale || \
    defined PROBE_tmem
__device__ unsigned take(unsigned* place) {
  if (first_warp())
    asm volatile(
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 32;"
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::"r"(at(place))
        : "memory");
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  return *place;
}

__device__ unsigned load(unsigned tensor) {
  unsigned word;
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1]; tcgen05.wait::ld.sync.aligned;"
               : "=r"(word)
               : "r"(tensor + (threadIdx.x / 32 << 21))
               : "memory");
  return word;
}

__device__ void give_back(unsigned tensor) {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  if (first_warp())
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 32;" ::"r"(tensor));
}

__device__ void commit(u64* barrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                   at(barrier))
               : "memory");
}

__device__ u64 operand(const unsigned* tile) {
  return (at(tile) >> 4 & 0x3fff) | 8ull << 16 | 16ull << 32 | 1ull << 46;
}
#endif

#ifdef PROBE_tmem
PROBE probe(unsigned* out, const void* map) {
  __shared__ unsigned place;
  const unsigned tensor = take(&place);
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1}; tcgen05.wait::st.sync.aligned;" ::"r"(
          tensor + (threadIdx.x / 32 << 21)),
      "r"(7)
      : "memory");
  const unsigned found = load(tensor);
  give_back(tensor);
  answer(out, found == 7);
}
#endif

#ifdef PROBE_tcgen05
PROBE probe(unsigned* out, const void* map) {
  __shared__ alignas(128) unsigned tile[1024];
  __shared__ unsigned place;
  __shared__ u64 barrier;
  fill(tile, 0x3f803f80);  // ones in bf16
  open_barrier(&barrier, 0);
  const unsigned tensor = take(&place);
  // fp32 += bf16 x bf16, 128 x 16
  const unsigned what = 1u << 4 | 1u << 7 | 1u << 10 | 2u << 17 | 8u << 24;
  if (threadIdx.x == 0) {
    asm volatile(
        "{ .reg .pred add; setp.ne.u32 add, 0, 0;"
        "  tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %1, %2, add; }" ::"r"(tensor),
        "l"(operand(tile)), "r"(what)
        : "memory");
    commit(&barrier);
  }
  const bool done = arrived(&barrier);
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  const unsigned found = load(tensor);
  give_back(tensor);
  answer(out, done && found == __float_as_uint(16.0f));
}
#endif

#ifdef PROBE_tcgen05_int8
PROBE probe(unsigned* out, const void* map) {
  __shared__ alignas(128) unsigned tile[1024];
  __shared__ unsigned place;
  __shared__ u64 barrier;
  fill(tile, 0x01010101);
  open_barrier(&barrier, 0);
  const unsigned tensor = take(&place);
  // int32 += int8 x int8, 128 x 16
  const unsigned what = 2u << 4 | 1u << 7 | 1u << 10 | 2u << 17 | 8u << 24;
  if (threadIdx.x == 0) {
    asm volatile(
        "{ .reg .pred add; setp.ne.u32 add, 0, 0;"
        "  tcgen05.mma.cta_group::1.kind::i8 [%0], %1, %1, %2, add; }" ::"r"(tensor),
        "l"(operand(tile)), "r"(what)
        : "memory");
    commit(&barrier);
  }
  const bool done = arrived(&barrier);
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  const unsigned found = load(tensor);
  give_back(tensor);
  answer(out, done && found == 32);
}
#endif

#ifdef PROBE_tcgen05_block_scale
PROBE probe(unsigned* out, const void* map) {
  __shared__ alignas(128) unsigned tile[1024];
  __shared__ unsigned place;
  __shared__ u64 barrier;
  if (map) {
    const unsigned tensor = take(&place);
    asm volatile(
        "{ .reg .pred add; setp.ne.u32 add, 0, 0;"
        "  tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16"
        " [%0], %1, %1, %2, [%3], [%3], add; }" ::"r"(tensor),
        "l"(operand(tile)), "r"(0), "r"(tensor + 16)
        : "memory");
    commit(&barrier);
    give_back(tensor);
  }
}
#endif

#ifdef PROBE_two_cta
CLUSTER probe(unsigned* out, const void* map) {
  __shared__ unsigned place;
  if (first_warp())
    asm volatile(
        "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], 32;"
        "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::"r"(at(&place))
        : "memory");
  cluster_sync();
  if (map)
    asm volatile(
        "{ .reg .pred add; setp.ne.u32 add, 0, 0;"
        "  tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %1, %2, add; }" ::"r"(place),
        "l"((u64)at(&place)), "r"(0)
        : "memory");
  if (first_warp())
    asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, 32;" ::"r"(place));
  cluster_sync();
  answer(out, true);
}
#endif
