// Hopper's tensor-core products (wgmma): a warpgroup of 128 threads multiplies tiles in shared
// memory.
//
// Tiles hold rows of 64 bf16 along k, 128 bytes each, with TMA's 128-byte swizzle, at multiples of
// 1024 bytes. Of a 64 x N product, thread t of the warpgroup gets row 16 (t / 32) + t % 32 / 4 and
// the row 8 below. Of every 8 columns, thread t gets column 2 (t % 4) and the next.

// Returns the descriptor of a tile: its address / 16, the stride of 1024 bytes per 8 rows, and the
// swizzle.
__device__ inline unsigned long long tile_descriptor(const void* tile) {
  const unsigned long long address = __cvta_generic_to_shared(tile);
  return (address & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Call this before the first wgmma, and after a thread has written to the accumulators.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `most` groups are still running. The compiler does not know that the sums
// change here, so pass them through an empty asm with "+f" before you read them.
template <int most>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(most) : "memory");
}

#define R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(d, i) R4(d, i), R4(d, i + 4), R4(d, i + 8), R4(d, i + 12)
#define R64(d, i) R16(d, i), R16(d, i + 16), R16(d, i + 32), R16(d, i + 48)

// sum = a b^T + (add ? sum : 0) over 16 of k, for 64 rows of a and 128 or 256 rows of b.
__device__ inline void wgmma(float (&sum)[64], unsigned long long a, unsigned long long b,
                             int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0;"
      " wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"
      " %64, %65, p, 1, 1, 0, 0; }"
      : R64(sum, 0)
      : "l"(a), "l"(b), "r"(add));
}

__device__ inline void wgmma(float (&sum)[128], unsigned long long a, unsigned long long b,
                             int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %130, 0;"
      " wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16"
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
      " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"
      " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"
      " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,"
      " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126,"
      " %127}, %128, %129, p, 1, 1, 0, 0; }"
      : R64(sum, 0), R64(sum, 64)
      : "l"(a), "l"(b), "r"(add));
}

#undef R4
#undef R16
#undef R64

// Sets the number of registers per thread of this warpgroup. Another warpgroup can take registers
// that this one gives up.
template <int registers>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
