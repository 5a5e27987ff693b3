/*
 * The burner's kernels in PTX, which the driver compiles, so that no CUDA toolkit is needed
 *
 * The simulated GPU does not execute PTX. It has kernels with the same names
 * (simgpu/cuda_module.c), so a new kernel has to be added there as well.
 */
#ifndef BENCH_BURNER_KERNELS_H
#define BENCH_BURNER_KERNELS_H

// clang-format off: assembly
/* %n dependent multiply-adds. The result goes to %p only if it is 0, which never happens. */
#define MULTIPLY_ADD(label)                                                                        \
    "  mov.u64 %i, 0;\n  mov.f32 %a, 0f3F800000;\n" label                                          \
    ":\n  fma.rn.f32 %a, %a, 0f3F7FFFFF, 0f33800000;\n"                                            \
    "  add.u64 %i, %i, 1;\n  setp.lt.u64 %q, %i, %n;\n  @%q bra " label ";\n"                      \
    "  setp.eq.f32 %q, %a, 0f00000000;\n  @%q st.global.f32 [%p], %a;\n"

static const char ptx[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry burn(.param .u64 count, .param .u64 sink)\n{\n"
    "  .reg .u64 %n, %i, %p;\n  .reg .f32 %a;\n  .reg .pred %q;\n"
    "  ld.param.u64 %n, [count];\n  ld.param.u64 %p, [sink];\n"
    MULTIPLY_ADD("LOOP")
    "  ret;\n}\n"
    ".visible .entry stamp(.param .u64 slot)\n{\n"
    "  .reg .u64 %p, %t;\n  ld.param.u64 %p, [slot];\n"
    "  mov.u64 %t, %globaltimer;\n  st.global.u64 [%p], %t;\n  ret;\n}\n"
    /* One thread per block adds 1 to the counter and waits until all blocks have done so. */
    ".visible .entry together(.param .u64 count, .param .u64 sink)\n{\n"
    "  .reg .u64 %n, %i, %p, %c, %all, %goal;\n  .reg .u32 %x;\n  .reg .f32 %a;\n"
    "  .reg .pred %q;\n"
    "  ld.param.u64 %n, [count];\n  ld.param.u64 %p, [sink];\n"
    MULTIPLY_ADD("LOOP")
    "  bar.sync 0;\n  mov.u32 %x, %tid.x;\n  setp.ne.u32 %q, %x, 0;\n  @%q bra DONE;\n"
    "  mov.u32 %x, %nctaid.x;\n  cvt.u64.u32 %all, %x;\n"
    "  atom.global.add.u64 %c, [%p+64], 1;\n"
    "  div.u64 %goal, %c, %all;\n  add.u64 %goal, %goal, 1;\n  mul.lo.u64 %goal, %goal, %all;\n"
    "WAIT:\n  ld.volatile.global.u64 %c, [%p+64];\n  setp.lt.u64 %q, %c, %goal;\n"
    "  @%q bra WAIT;\n"
    "DONE:\n  ret;\n}\n"
    ".visible .entry persist(.param .u64 count, .param .u64 sink, .param .u64 slot,"
    " .param .u64 times)\n{\n"
    "  .reg .u64 %n, %i, %p, %s, %m, %t;\n  .reg .u32 %x, %y;\n  .reg .f32 %a;\n"
    "  .reg .pred %q;\n"
    "  ld.param.u64 %n, [count];\n  ld.param.u64 %p, [sink];\n"
    "  ld.param.u64 %s, [slot];\n  ld.param.u64 %m, [times];\n"
    "AGAIN:\n"
    MULTIPLY_ADD("LOOP")
    "  mov.u32 %x, %tid.x;\n  mov.u32 %y, %ctaid.x;\n  or.b32 %x, %x, %y;\n"
    "  setp.ne.u32 %q, %x, 0;\n  @%q bra NEXT;\n"
    "  mov.u64 %t, %globaltimer;\n  st.volatile.global.u64 [%s], %t;\n"
    "NEXT:\n  add.u64 %s, %s, 8;\n  sub.u64 %m, %m, 1;\n  setp.ne.u64 %q, %m, 0;\n"
    "  @%q bra AGAIN;\n  ret;\n}\n"
    /* In each pass every thread accesses 16 bytes. The threads together cover one part of the
     * memory, and the next pass covers the next part. */
    ".visible .entry sweep(.param .u64 count, .param .u64 block, .param .u64 bytes)\n{\n"
    "  .reg .u64 %n, %i, %p, %b, %o, %s, %e;\n  .reg .u32 %x, %y, %z, %r<4>;\n"
    "  .reg .pred %q;\n"
    "  ld.param.u64 %n, [count];\n  ld.param.u64 %p, [block];\n  ld.param.u64 %b, [bytes];\n"
    "  mov.u32 %x, %ctaid.x;\n  mov.u32 %y, %ntid.x;\n  mov.u32 %z, %tid.x;\n"
    "  mad.lo.u32 %z, %x, %y, %z;\n  mul.wide.u32 %o, %z, 16;\n"
    "  mov.u32 %x, %nctaid.x;\n  mul.lo.u32 %x, %x, %y;\n  mul.wide.u32 %s, %x, 16;\n"
    "  mov.u64 %i, 0;\n"
    "LOOP:\n  add.u64 %e, %p, %o;\n"
    "  ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%e];\n  add.u32 %r0, %r0, 1;\n"
    "  st.global.v4.u32 [%e], {%r0, %r1, %r2, %r3};\n"
    "  add.u64 %o, %o, %s;\n  setp.ge.u64 %q, %o, %b;\n  @%q sub.u64 %o, %o, %b;\n"
    "  add.u64 %i, %i, 1;\n  setp.lt.u64 %q, %i, %n;\n  @%q bra LOOP;\n  ret;\n}\n";
// clang-format on

#endif
