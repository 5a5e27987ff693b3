/*
 * The device file
 *
 * One simulated GPU is one file, mapped shared by every process that uses it. It has three parts:
 *
 *   0x0000  struct gpu_config    written when the device is created; later only `lost` changes
 *   0x1000  struct gpu_shared    the state; most of it changes only with its lock held
 *   ...     struct gpu_context[] the contexts' queues
 *
 * The holder of the lock may be killed between any two stores. Nothing has to be repaired
 * afterwards, because each change takes effect with a single store:
 *
 *   - the timeline exists twice; an advance writes the other copy and then flips `current`;
 *   - a command is written at the tail of its queue, then the tail moves;
 *   - a context is filled in, then its `serial` makes it exist; zero makes it vanish;
 *   - memory is one word per process, and the sum over the device is computed on request.
 *
 * simgpu.py has the same offsets; tests compare the two.
 */
#pragma once

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define SIMGPU_MAGIC          0x5550474d49534754ull /* "TGSIMGPU" in memory */
#define SIMGPU_LAYOUT_VERSION 5

#define GPU_NVLINKS  18   /* per GPU, as on an H200 */
#define GPU_SLOTS    256  /* libraries attached at once; the lock word has eight bits for a slot */
#define GPU_CONTEXTS 256  /* contexts at once */
#define GPU_QUEUE    1024 /* commands in flight per context, as on the hardware */

/*
 * Slots from here on belong to the NVML library, so that the two libraries in one process never
 * request the same byte lock: the kernel would grant it to both.
 */
#define GPU_SLOT_NVML 192

/* The states of a process that is checkpointed from outside, as in NVIDIA's cuda.h. */
typedef enum {
    CU_PROCESS_STATE_RUNNING = 0,
    CU_PROCESS_STATE_LOCKED = 1,
    CU_PROCESS_STATE_CHECKPOINTED = 2,
} CUprocessState;

/* Record locks on these bytes of the device file, far beyond its end, show which slots are in
 * use. */
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
    uint32_t jitter; /* per mille of a kernel's duration, in both directions */
    uint8_t uuid[16];
    char name[96];
    uint32_t pci_bus;
    _Atomic uint32_t lost; /* NVML reports that the GPU has fallen off the bus */
    uint32_t place[4];     /* NUMA node, host bridge, PCIe tree, switch, each + 1; 0: unknown */
    uint8_t nvlinks[20];   /* the other end of each link: GPU_LINK_..., or a GPU's minor + 1 */
    uint32_t reserved[968];
};

#define GPU_LINK_NONE   0
#define GPU_LINK_SWITCH 0xfe
#define GPU_LINK_UNSEEN 0xff /* a switch that is hidden from a virtual machine */

/* One attached library of one process. */
struct gpu_slot {
    _Atomic uint64_t key;      /* identifies the process among those on the same machine */
    _Atomic uint64_t memory;   /* bytes allocated, not counting those of the contexts themselves */
    _Atomic uint32_t attached; /* generation of the owner, 0 for a free slot */
    _Atomic uint32_t state;    /* CUprocessState of the process */
    _Atomic uint32_t inside;   /* 1 while a thread of the process is in a call */
    uint32_t reserved[9];
};

/* What the timeline records about one context. */
struct gpu_lane {
    uint64_t head;     /* commands completed since the context was created */
    uint64_t progress; /* ns of the command at the head that have been executed */
    uint64_t busy;     /* ns of GPU time */
    uint64_t slices;   /* number of times that the context got the GPU */
    uint64_t resident; /* ns on the GPU, with or without work, excluding switches */
    uint64_t early;    /* number of times that it ran out of work and another context took over */
    uint64_t before;   /* value of `resident` when the last turn began */
    uint64_t full;     /* ns of turns that filled their slice and ended with a context waiting */
    uint64_t ended;    /* ns: when the last of those turns ended */
    uint64_t fills;    /* whether the last turn was one of those */
};

/* The history of the GPU up to `now`. */
struct gpu_timeline {
    uint64_t now;            /* ns: everything before this has been decided */
    uint64_t slice_end;      /* ns: from here on the resident context may be replaced */
    uint64_t switch_end;     /* ns: from here on the resident context executes */
    uint64_t resident;       /* serial of the context on the GPU, 0 for none */
    uint32_t resident_index; /* its index */
    uint32_t overtime; /* the slice ended with no context waiting; the next starts when one is */
    uint64_t switches;
    uint64_t busy; /* ns, excluding switches */
    struct gpu_lane lanes[GPU_CONTEXTS];
};

/* The command waits for a word in its process's memory. */
#define GPU_HELD (1ull << 63)
/* The kernel polls a word; the kernel's length is set once the word has the expected value. */
#define GPU_SPINS (1ull << 62)

struct gpu_command {
    uint64_t duration;  /* ns; GPU_HELD: does not start before its owner clears the bit */
    uint64_t completed; /* ns on the GPU's clock; valid below the head */
};

struct gpu_context {
    _Atomic uint64_t serial; /* 0: does not exist; unique over the life of the device */
    _Atomic uint64_t tail;   /* commands submitted since the context was created */
    uint32_t slot;
    uint32_t generation;    /* of the owner of the slot */
    _Atomic uint64_t slice; /* ns; 0: that of the device */
    _Atomic uint32_t off;   /* calls to switch off minus calls to switch on; 0: scheduled */
    uint32_t padding;
    uint64_t reserved[3];
    struct gpu_command queue[GPU_QUEUE];
};

/* The device's busy time at one moment: two of these give a utilisation. */
struct gpu_sample {
    uint64_t now;
    uint64_t busy;
};

struct gpu_shared {
    _Atomic uint32_t lock;        /* 0: free, else see device.c */
    _Atomic uint32_t generations; /* attachments so far */
    _Atomic uint32_t clock_mode;  /* 0: CLOCK_MONOTONIC, 1: `virtual_now` */
    _Atomic uint32_t current;     /* index of the valid timeline */
    _Atomic uint64_t virtual_now; /* ns */
    _Atomic uint64_t reaped;      /* CLOCK_MONOTONIC ns of the last search for dead owners */
    _Atomic uint64_t serials;     /* contexts so far */
    _Atomic uint32_t n_contexts;  /* all contexts have an index below this */
    _Atomic uint32_t recoveries;  /* number of times that the lock was taken from a dead holder */
    _Atomic uint32_t steered;     /* whether slices were ever set, or contexts switched off */
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
_Static_assert(sizeof(struct gpu_timeline) == 56 + 80 * GPU_CONTEXTS, "simgpu.py has this size");
_Static_assert(sizeof(struct gpu_context) == 64 + 16384, "simgpu.py has this size, too");
