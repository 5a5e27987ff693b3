/*
 * The device file
 *
 * One simulated GPU is one file, mapped shared by everybody who uses it. Three parts:
 *
 *   0x0000  struct gpu_config    written by whoever creates the device, then only read
 *   0x1000  struct gpu_shared    the state, changed only under its lock
 *   ...     struct gpu_context[] the contexts' queues
 *
 * A holder of the lock may be killed between any two stores. Nothing has to be repaired
 * afterwards, because each change takes effect by one store:
 *
 *   - the timeline exists twice; an advance writes the other copy and then flips `current`;
 *   - a command is written behind the tail of its queue, then the tail moves;
 *   - a context is filled in, then `serial` makes it exist; zero makes it vanish;
 *   - memory is one word per process, and the sum over the device is computed when asked.
 *
 * simgpu.py knows the same offsets; tests compare the two.
 */
#pragma once

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define SIMGPU_MAGIC          0x5550474d49534754ull /* "TGSIMGPU" in memory */
#define SIMGPU_LAYOUT_VERSION 4

#define GPU_NVLINKS  18   /* of each GPU, as an H200 has */
#define GPU_SLOTS    256  /* libraries attached at once; the lock word has eight bits for one */
#define GPU_CONTEXTS 256  /* contexts at once */
#define GPU_QUEUE    1024 /* commands in flight per context, as on the hardware */

/* Slots from here on belong to the NVML library, so that the two libraries of one process never
 * want the same byte lock: the kernel would give it to both. */
#define GPU_SLOT_NVML 192

/* Record locks on these bytes of the device file, far behind its end, say which slots live. */
#define GPU_SLOT_LOCK (1ll << 40)

struct gpu_config {
    uint64_t magic;
    uint32_t version;
    uint32_t config_size;
    uint64_t file_size;
    uint64_t memory;         /* bytes */
    uint64_t context_memory; /* bytes that each context takes */
    uint64_t slice;          /* ns */
    uint64_t switch_cost;    /* ns */
    uint64_t seed;
    uint32_t jitter; /* per mille of a kernel's duration, either way */
    uint8_t uuid[16];
    char name[96];
    uint32_t pci_bus;
    _Atomic uint32_t lost; /* NVML finds it off the bus; the one field that is changed later */
    uint32_t place[4];     /* NUMA node, host bridge, PCIe tree, switch, each + 1; 0: not known */
    uint8_t nvlinks[20];   /* what is at the end of each: GPU_LINK_..., or a GPU's minor + 1 */
    uint32_t reserved[968];
};

#define GPU_LINK_NONE   0
#define GPU_LINK_SWITCH 0xfe
#define GPU_LINK_UNSEEN 0xff /* a switch that a virtual machine does not see */

/* One attached library of one process. */
struct gpu_slot {
    _Atomic uint64_t key;      /* names the process among those of the same machine */
    _Atomic uint64_t memory;   /* bytes allocated, without the contexts' own */
    _Atomic uint32_t attached; /* generation of the owner, 0 for a free slot */
    uint32_t reserved[11];
};

/* What the timeline knows of one context. */
struct gpu_lane {
    uint64_t head;     /* commands completed since the context was made */
    uint64_t progress; /* ns of the command at the head already executed */
    uint64_t busy;     /* ns of GPU time */
    uint64_t slices;   /* times that the context got the GPU */
    uint64_t resident; /* ns on the GPU, with work or without; switches not included */
    uint64_t early;    /* times that it gave the GPU to another, as it had no more work */
    uint64_t before;   /* what `resident` was when its last turn began */
    uint64_t full;     /* ns of turns that ended with their slice, as another waited */
    uint64_t ended;    /* ns: when the last of those ended */
    uint64_t fills;    /* its last turn was one of those */
};

/* The GPU's history up to `now`. */
struct gpu_timeline {
    uint64_t now;            /* ns: everything before has been decided */
    uint64_t slice_end;      /* ns: the resident context may be replaced from here on */
    uint64_t switch_end;     /* ns: the resident context executes from here on */
    uint64_t resident;       /* serial of the context on the GPU, 0 for none */
    uint32_t resident_index; /* its index */
    uint32_t overtime; /* its slice ended with nobody waiting: the next begins when somebody does */
    uint64_t switches;
    uint64_t busy; /* ns, switches not included */
    struct gpu_lane lanes[GPU_CONTEXTS];
};

/* The command waits for a word of its process's memory. */
#define GPU_HELD (1ull << 63)
/* The kernel spins: its owner sets a length when it has met what it waits for. */
#define GPU_SPINS (1ull << 62)

struct gpu_command {
    uint64_t duration;  /* ns; GPU_HELD: not before its owner clears the bit */
    uint64_t completed; /* ns on the GPU's clock; valid below the head */
};

struct gpu_context {
    _Atomic uint64_t serial; /* 0: does not exist; unique over the life of the device */
    _Atomic uint64_t tail;   /* commands submitted since the context was made */
    uint32_t slot;
    uint32_t generation;    /* of the slot's owner */
    _Atomic uint64_t slice; /* ns; 0: the device's */
    _Atomic uint32_t off;   /* switched off so many times more than on; scheduled at 0 */
    uint32_t padding;
    uint64_t reserved[3];
    struct gpu_command queue[GPU_QUEUE];
};

/* Device busy time at some moment: two of them make a utilisation. */
struct gpu_sample {
    uint64_t now;
    uint64_t busy;
};

struct gpu_shared {
    _Atomic uint32_t lock;        /* 0: free, else see device.c */
    _Atomic uint32_t generations; /* attachments so far */
    _Atomic uint32_t clock_mode;  /* 0: CLOCK_MONOTONIC, 1: `virtual_now` */
    _Atomic uint32_t current;     /* which timeline holds */
    _Atomic uint64_t virtual_now; /* ns */
    _Atomic uint64_t reaped;      /* CLOCK_MONOTONIC ns: dead owners were last looked for */
    _Atomic uint64_t serials;     /* contexts so far */
    _Atomic uint32_t n_contexts;  /* no context has an index from here on */
    _Atomic uint32_t recoveries;  /* times that the lock was taken from a dead holder */
    _Atomic uint32_t steered;     /* slices were set, or contexts switched off, ever */
    uint32_t padding;
    struct gpu_sample samples[2]; /* the older one is at least half a second old */
    struct gpu_slot slots[GPU_SLOTS];
    struct gpu_timeline timelines[2];
};

struct gpu {
    struct gpu_config config;
    struct gpu_shared shared;
    struct gpu_context contexts[GPU_CONTEXTS] __attribute__((aligned(4096)));
};

#define GPU_OFFSET(member, value)                                                                  \
    _Static_assert(offsetof(struct gpu, member) == (value), "simgpu.py has this offset, too")

GPU_OFFSET(config.file_size, 16);
GPU_OFFSET(config.memory, 24);
GPU_OFFSET(config.slice, 40);
GPU_OFFSET(config.jitter, 64);
GPU_OFFSET(config.uuid, 68);
GPU_OFFSET(config.name, 84);
GPU_OFFSET(config.pci_bus, 180);
GPU_OFFSET(config.lost, 184);
GPU_OFFSET(config.place, 188);
GPU_OFFSET(config.nvlinks, 204);
GPU_OFFSET(shared, 0x1000);
GPU_OFFSET(shared.clock_mode, 0x1008);
GPU_OFFSET(shared.current, 0x100c);
GPU_OFFSET(shared.virtual_now, 0x1010);
GPU_OFFSET(shared.n_contexts, 0x1028);
GPU_OFFSET(shared.slots, 0x1058);
GPU_OFFSET(shared.timelines, 0x5058);
GPU_OFFSET(contexts, 0x10000);
_Static_assert(sizeof(struct gpu_slot) == 64, "simgpu.py has this size, too");
_Static_assert(sizeof(struct gpu_timeline) == 56 + 80 * GPU_CONTEXTS, "simgpu.py has it, too");
_Static_assert(sizeof(struct gpu_context) == 64 + 16384, "simgpu.py has this size, too");
