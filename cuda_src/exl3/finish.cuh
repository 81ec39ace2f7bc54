// finish.cuh: outputs of a linear from the sums of its units, with many loads on their way at once: a launch
// that finishes few rows is as long as its chain of loads.  Used by linear_finish and gdn_conv.
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

// part: of the four outputs' unit 0, 16-byte aligned; step: float4s between units, fewer than 2^32 in all.  One leaf:
// MANY segments at a time.  More (at most 8): all leaves at a time, segment by segment, the first two at once.
// LEAVES: there may be more than one.
template <bool LEAVES> struct FnUnits {
    enum : u32 { MANY = 8 };
    const float4* at;
    u32 step, leaves, segments;
    float4 first[MANY], second[LEAVES ? MANY : 1];

    FN_DEVICE void ask(const float* part, u32 n_leaves, u32 n_segments, u32 between) {
        at = reinterpret_cast<const float4*>(part), step = between;
        leaves = LEAVES ? n_leaves : 1u, segments = n_segments;
        if (!LEAVES || leaves == 1u) {
#pragma unroll
            for (u32 i = 0; i < MANY; i++)
                if (i == 0u || i < segments) first[i] = fn_ld_here(at + i * step);
            return;
        }
#pragma unroll
        for (u32 i = 0; i < MANY; i++) {
            if (i < leaves) first[i] = fn_ld_here(leaf(i));
            if (i < leaves && segments > 1u) second[i] = fn_ld_here(leaf(i) + step);
        }
    }
    FN_DEVICE const float4* leaf(u32 i) const { return at + i * (segments * step); }
    FN_DEVICE float4 sum() {
        float4 all = first[0];
        if (!LEAVES || leaves == 1u) {
#pragma unroll
            for (u32 i = 1; i < MANY; i++)
                if (i < segments) all = fn_add_quads(all, first[i]);
            for (u32 from = MANY; from < segments; from += MANY) {
#pragma unroll
                for (u32 i = 0; i < MANY; i++)
                    if (from + i < segments) first[i] = fn_ld_here(at + (from + i) * step);
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
                if (s + 1u < segments) second[i] = fn_ld_here(leaf(i) + (s + 1u) * step);
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

// Outputs 128 block + 4 lane .. + 3 of a linear.  EXL3: n % 128 == 0.  LEAVES: its sums may have more than one.
template <bool LEAVES> struct FnFinish {
    u32 at, n;
    bool exl3, there, quads;
    float scale[4];
    FnUnits<LEAVES> units;

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
        if (there && quads) units.ask(part(linear, row), linear.leaves, linear.segments, cap * (n >> 2));
    }
    // v: sums of the row that was asked for; zero beyond n.  Behind it the next row may be asked for.
    FN_DEVICE void sum(const FnLinear& linear, u32 row, u32 cap, float (&v)[4]) {
        v[0] = v[1] = v[2] = v[3] = 0.f;
        if (there && quads) {
            float4 all = units.sum();
            v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
        } else {
#pragma unroll 1
            for (u32 i = 0; i < 4u; i++) {
                v[0] = v[1], v[1] = v[2], v[2] = v[3], v[3] = 0.f;
                if (at + i < n)
                    v[3] = LEAVES ? fn_sum_units(part(linear, row) + i, linear.leaves, linear.segments, (u64)cap * n)
                                  : fn_sum_leaf(part(linear, row) + i, linear.segments, (u64)cap * n);
            }
        }
    }
    // v: sums, become outputs.
    FN_DEVICE void rotate(const FnLinear& linear, float (&v)[4]) const {
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
    FN_DEVICE void values(const FnLinear& linear, u32 row, u32 cap, float (&v)[4]) {
        sum(linear, row, cap, v);
        rotate(linear, v);
    }
    // to: of row 0.
    FN_DEVICE void store(float* to, u32 row, const float (&v)[4]) const {
        float* out = to + (u64)row * n + at;
        if (there && quads) {
            *reinterpret_cast<float4*>(out) = make_float4(v[0], v[1], v[2], v[3]);
        } else {
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if (at + i < n) out[i] = v[i];
        }
    }
};
