/*
 * The mark of the simulated GPU
 *
 * An ELF note (owner "tidegate", type 1, one 32-bit word) that distinguishes this library from
 * NVIDIA's driver. ELF tools show it as section .note.tidegate.simgpu. The word is the version of
 * the device file that the library supports.
 */
#include "layout.h"

#define STRING(x) #x
#define VALUE(x)  STRING(x)

__asm__(".pushsection .note.tidegate.simgpu, \"a\", %note\n"
        ".balign 4\n"
        ".long 9, 4, 1\n" /* size of the name with its NUL, size of the description, type */
        ".asciz \"tidegate\"\n"
        ".balign 4\n"
        ".long " VALUE(SIMGPU_LAYOUT_VERSION) "\n"
                                              ".popsection\n");
