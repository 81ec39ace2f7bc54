// finish.cuh: outputs of a linear from the sums of its units, with many loads on their way at once: a launch
// that finishes few rows is as long as its chain of loads.  Used by linear_finish.
//
//   FnUnits    four neighbouring outputs of all units: asked for, then summed
//   FnFinish   a warp's block of 128 outputs: prepared ahead of fn_wait_prior, then row by row
//
// Orders part_sum_v1 (as fn_sum_units of exl3.cuh) and hadamard.
#pragma once
#include "exl3.cuh"

FN_DEVICE float4 fn_add_quads(float4 a, float4 b) {
    return make_float4(fn_add(a.x, b.x), fn_add(a.y, b.y), fn_add(a.z, b.z), fn_add(a.w, b.w));
}

// part: of the four outputs' unit 0, 16-byte aligned; stride: floats between units, a multiple of 4.  One leaf:
// MANY segments at a time.  More (at most 8): all leaves at a time, segment by segment, the first two at once.
struct FnUnits {
    enum : u32 { MANY = 8 };
    const float4* at;
    u64 step;
    u32 leaves, segments;
    float4 first[MANY], second[MANY];

    FN_DEVICE const float4* unit(u32 i) const {
        return leaves == 1u ? at + i * step : at + (u64)i * segments * step;
    }
    FN_DEVICE void ask(const float* part, u32 n_leaves, u32 n_segments, u64 stride) {
        at = reinterpret_cast<const float4*>(part), step = stride >> 2;
        leaves = n_leaves, segments = n_segments;
        u32 n = leaves == 1u ? segments : leaves;
#pragma unroll
        for (u32 i = 0; i < MANY; i++)
            if (i < n) first[i] = fn_ld_here(unit(i));
#pragma unroll
        for (u32 i = 0; i < MANY; i++)
            if (i < n && leaves != 1u && segments > 1u) second[i] = fn_ld_here(unit(i) + step);
    }
    FN_DEVICE float4 sum() {
        float4 all = first[0];
        if (leaves == 1u) {
#pragma unroll
            for (u32 i = 1; i < MANY; i++)
                if (i < segments) all = fn_add_quads(all, first[i]);
            for (u32 from = MANY; from < segments; from += MANY) {
#pragma unroll
                for (u32 i = 0; i < MANY; i++)
                    if (from + i < segments) first[i] = fn_ld_here(unit(from + i));
#pragma unroll
                for (u32 i = 0; i < MANY; i++)
                    if (from + i < segments) all = fn_add_quads(all, first[i]);
            }
            return all;
        }
        for (u32 s = 1; s < segments; s++) {
#pragma unroll
            for (u32 i = 0; i < MANY; i++) {
                if (i >= leaves) continue;
                first[i] = fn_add_quads(first[i], second[i]);
                if (s + 1u < segments) second[i] = fn_ld_here(unit(i) + (s + 1u) * step);
            }
        }
        all = fn_add_quads(first[0], first[1]);
        if (leaves > 2u) all = fn_add_quads(all, fn_add_quads(first[2], first[3]));
        if (leaves > 4u) {
            float4 last = fn_add_quads(first[6], first[7]);
            all = fn_add_quads(all, fn_add_quads(fn_add_quads(first[4], first[5]), last));
        }
        return all;
    }
};

// Outputs 128 block + 4 lane .. + 3 of a linear.  EXL3: n % 128 == 0.
struct FnFinish {
    u32 at, n;
    bool exl3, there, quads;
    float scale[4];
    FnUnits units;

    FN_DEVICE FnFinish(const FnLinear& linear, u32 block)
        : at(128u * block + 4u * (threadIdx.x & 31u)), n(linear.n), exl3(fn_is_exl3(linear.w)), there(at < n),
          quads((n & 3u) == 0), scale{1.f, 1.f, 1.f, 1.f} {
        if (exl3 && there) fn_load_early_h4(reinterpret_cast<const u16*>(linear.w.svh) + at, scale);
    }
    FN_DEVICE const float* part(const FnLinear& linear, u32 row) const {
        return reinterpret_cast<const float*>(linear.part) + (u64)row * n + at;
    }
    // Behind fn_wait_prior; row < cap.
    FN_DEVICE void ask(const FnLinear& linear, u32 row, u32 cap) {
        if (there && quads) units.ask(part(linear, row), linear.leaves, linear.segments, (u64)cap * n);
    }
    // v: of the row that was asked for; zero beyond n.
    FN_DEVICE void values(const FnLinear& linear, u32 row, u32 cap, float (&v)[4]) {
        v[0] = v[1] = v[2] = v[3] = 0.f;
        if (there && quads) {
            float4 sum = units.sum();
            v[0] = sum.x, v[1] = sum.y, v[2] = sum.z, v[3] = sum.w;
        } else {
#pragma unroll 1
            for (u32 i = 0; i < 4u && at + i < n; i++) {
                u64 stride = (u64)cap * n;
                float sum = fn_sum_units(part(linear, row) + i, linear.leaves, linear.segments, stride);
                v[0] = i == 0u ? sum : v[0], v[1] = i == 1u ? sum : v[1];
                v[2] = i == 2u ? sum : v[2], v[3] = i == 3u ? sum : v[3];
            }
        }
        if (!exl3) return;
        fn_hadamard128(v);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = fn_mul(v[i], scale[i]);
        if (linear.bias) {
            float b[4];
            fn_load_h4(reinterpret_cast<const u16*>(linear.bias) + at, b);
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = fn_add(v[i], b[i]);
        }
    }
    FN_DEVICE void store(const FnLinear& linear, u32 row, const float (&v)[4]) const {
        float* out = reinterpret_cast<float*>(linear.out) + (u64)row * n + at;
        if (there && quads) {
            *reinterpret_cast<float4*>(out) = make_float4(v[0], v[1], v[2], v[3]);
        } else {
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if (at + i < n) out[i] = v[i];
        }
    }
};
