/*
 * CUDA IPC for blocks that can be moved; see parking.h.
 *
 * Through CUDA IPC, the driver shares only memory from its own cuMemAlloc. For these blocks, the
 * library therefore gives out its own handles. A process that opens a handle connects to a socket
 * of the process that gave it out, and receives a file descriptor for the physical allocation,
 * which it maps. Once a handle has been given out, the block stays on the GPU, because it could not
 * be moved for both processes at once.
 *
 * The socket is in the abstract namespace, so it ends with the process and needs no directory. A
 * connection has to present a number from the handle, because the abstract namespace belongs to the
 * network namespace, which containers may share.
 */
#include "contexts.h"
#include "gate.h"
#include "pages.h"
#include "parking.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#define IPC_MAGIC       0x4350497465676474ull /* "tdgetIPC" in memory */
#define IPC_ANSWER_NS   (5 * NS_PER_S)        /* longest wait for the other process */
#define IPC_REQUEST_NS  NS_PER_S              /* longest wait for a connection's request */
#define IPC_END_NS      NS_PER_S              /* longest time that exit() waits for the thread */
#define IPC_ATTEMPTS    3
#define IPC_NAP_NS      (20 * NS_PER_MS) /* after a connection that was lost */
#define IPC_BACKLOG     64
#define IPC_PEERS       64 /* connections whose requests are awaited at the same time */
#define IPC_PEER_ACCESS 1  /* CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS */

/* The contents of a handle. The handle of a block never changes, because programs compare
 * handles. */
struct ipc_handle {
    uint64_t magic;
    struct parking_origin origin;
    uint64_t secret[2];
    uint64_t size, bytes; /* of the block */
    uint64_t zero;
};

_Static_assert(sizeof(struct ipc_handle) == sizeof(CUipcMemHandle), "it fills the handle");

struct ipc_request {
    uint64_t secret[2];
    uint64_t serial;
};

static struct os_lock own_lock;
static struct {
    uint64_t process; /* 0: this process has not given out a handle yet */
    uint64_t secret[2];
    int listener;
    uint64_t inode; /* of the listener */
} own = {.listener = -1};
static uint32_t serves; /* a thread is answering requests */

static struct os_lock open_lock;
static struct os_lock serve_lock; /* held by the thread while it may be in a call into the driver */
static bool ending;               /* guarded by serve_lock: the process is exiting */

/* ---- sockets ---- */

/* Returns the length of the address. */
static unsigned address_of(uint64_t process, struct sockaddr_un *address)
{
    int n;

    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    n = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "tidegate-ipc-%016llx",
                 (unsigned long long)process);
    return (unsigned)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

/* Limits each call on a socket to the time that is left. Returns false if there is none. */
static bool set_patience(int fd, uint64_t ends)
{
    uint64_t now = os_now();
    uint64_t left = ends > now ? ends - now : 0;
    struct timeval limit = {(time_t)(left / NS_PER_S), (long)(left % NS_PER_S / 1000)};

    if (left < NS_PER_MS)
        return false;
    os_call(SYS_setsockopt, fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    os_call(SYS_setsockopt, fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    return true;
}

/* Repeats a call on a socket until the time is up, because a signal, a stop or a freeze may
 * interrupt it. */
#define ipc_retry(result, fd, ends, call)                                                          \
    do                                                                                             \
        (result) = set_patience(fd, ends) ? (call) : -EAGAIN;                                      \
    while ((result) == -EINTR)

/* Sends a byte, with the descriptor unless that is -1. */
static void send_descriptor(int to, int fd)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    char byte = 'd';
    struct iovec iov = {&byte, 1};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};

    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        *CMSG_FIRSTHDR(&message) = (struct cmsghdr){
            .cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(CMSG_FIRSTHDR(&message)), &fd, sizeof fd);
    }
    os_call(SYS_sendmsg, to, &message, MSG_NOSIGNAL);
}

/* ---- the process that gives out handles ---- */

/* Reads a request, which is sent as a whole upon connecting, and answers it. */
static void answer(int fd)
{
    struct ipc_request request;
    int exported = -1;

    if (os_call(SYS_recvfrom, fd, &request, sizeof request, MSG_DONTWAIT, NULL, NULL) !=
            (long)sizeof request ||
        request.secret[0] != own.secret[0] || request.secret[1] != own.secret[1])
        return;
    os_lock(&serve_lock);
    if (!ending)
        exported = parking_descriptor(request.serial);
    os_unlock(&serve_lock);
    send_descriptor(fd, exported);
    if (exported >= 0)
        os_close(exported);
}

/* Creates the socket at the process's address. */
static bool listen_at(void)
{
    struct sockaddr_un address;
    unsigned length = address_of(own.process, &address);
    int fd = pages_socket(0);

    if (fd < 0)
        return false;
    if (os_call(SYS_bind, fd, &address, length) < 0 || os_call(SYS_listen, fd, IPC_BACKLOG) < 0 ||
        !pages_identify(fd, &own.inode, NULL)) {
        os_close(fd);
        return false;
    }
    own.listener = fd;
    return true;
}

/* Connections on which no request has arrived yet, oldest first. A silent connection must not keep
 * the others waiting. The program may close any of the descriptors, and open another file under the
 * same number. */
struct ipc_peer {
    int fd;
    uint64_t inode;
    uint64_t since;
};

struct ipc_peers {
    unsigned n;
    struct ipc_peer all[IPC_PEERS];
};

static void drop_peer(struct ipc_peers *peers, unsigned which)
{
    const struct ipc_peer *peer = &peers->all[which];

    if (pages_is_ours(peer->fd, peer->inode))
        os_close(peer->fd);
    peers->n--;
    for (unsigned i = which; i < peers->n; i++)
        peers->all[i] = peers->all[i + 1];
}

static void accept_peer(struct ipc_peers *peers)
{
    struct ipc_peer peer = {.since = os_now()};
    int fd = (int)os_call(SYS_accept4, own.listener, NULL, NULL, SOCK_CLOEXEC);

    if (fd < 0) {
        if (fd != -EINTR && fd != -EAGAIN && fd != -ECONNABORTED)
            os_sleep(IPC_NAP_NS); /* no more descriptors, for example */
        return;
    }
    peer.fd = pages_high(fd);
    pages_identify(peer.fd, &peer.inode, NULL);
    if (peers->n == IPC_PEERS)
        drop_peer(peers, 0);
    peers->all[peers->n++] = peer;
}

/* Waits until a connection or a request arrives, for a second at most, and handles what has
 * arrived. */
static void serve_once(struct ipc_peers *peers)
{
    struct pollfd polled[IPC_PEERS + 1] = {{.fd = own.listener, .events = POLLIN}};
    struct timespec limit = {.tv_sec = 1};
    uint64_t now;

    for (unsigned i = 0; i < peers->n; i++)
        polled[i + 1] = (struct pollfd){.fd = peers->all[i].fd, .events = POLLIN};
    if (os_call(SYS_ppoll, polled, peers->n + 1, &limit, NULL, 0) < 0)
        os_sleep(IPC_NAP_NS);
    now = os_now();
    for (unsigned i = peers->n; i-- > 0;) {
        const struct ipc_peer *peer = &peers->all[i];

        if (polled[i + 1].revents && pages_is_ours(peer->fd, peer->inode))
            answer(peer->fd);
        if (polled[i + 1].revents || now - peer->since > IPC_REQUEST_NS)
            drop_peer(peers, i);
    }
    if (polled[0].revents && pages_is_ours(own.listener, own.inode))
        accept_peer(peers);
}

static void *serve(void *argument)
{
    struct ipc_peers peers = {0};
    struct gate_visit visit;
    bool ends;

    (void)argument;
    os_lock(&serve_lock); /* gate_visit_begin() calls the driver */
    ends = ending;
    if (!ends)
        gate_visit_begin(&visit); /* for the life of the thread */
    os_unlock(&serve_lock);
    parking_exempt();
    os_call(SYS_prctl, PR_SET_NAME, "tidegate-ipc");
    while (!ends) {
        if (pages_is_ours(own.listener, own.inode) || listen_at())
            serve_once(&peers);
        else
            ends = true;
    }
    atomic_store_release(&serves, 0);
    return NULL;
}

/* Makes sure that the process has an address, and that a thread answers there. */
static bool be_served(void)
{
    bool done = true;

    os_lock(&own_lock);
    if (!own.process) {
        uint64_t numbers[3];

        done = os_call(SYS_getrandom, numbers, sizeof numbers, 0) == (long)sizeof numbers;
        if (done) {
            own.secret[0] = numbers[1];
            own.secret[1] = numbers[2];
            own.process = numbers[0] ? numbers[0] : 1;
        }
    }
    if (done && !atomic_load_acquire(&serves)) {
        done = listen_at();
        atomic_store_release(&serves, done);
        if (done && !helper_thread(serve, NULL)) {
            atomic_store_release(&serves, 0);
            os_close(own.listener);
            done = false;
        }
    }
    os_unlock(&own_lock);
    return done;
}

CONTROL_EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr)
{
    static uint32_t logged;
    struct parking_block block;
    struct ipc_handle handle;
    bool exported;

    if (!pHandle || !parking_applies() || !parking_find(dptr, &block) || parking_is_import(&block))
        return real->cuIpcGetMemHandle(pHandle, dptr);
    if (!be_served()) {
        if (!atomic_exchange_acq_rel(&logged, 1))
            control_log("cuIpcGetMemHandle is refused: memory that may be parked is shared through "
                        "a socket, which could not be created; set tidegate.gpu/parking to never");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    parking_enter(PARKING_MEMORY);
    exported = parking_export(dptr, &block);
    parking_leave();
    parking_publish();
    if (!exported)
        return CUDA_ERROR_INVALID_VALUE;
    handle = (struct ipc_handle){.magic = IPC_MAGIC,
                                 .origin = {own.process, block.serial},
                                 .secret = {own.secret[0], own.secret[1]},
                                 .size = block.size,
                                 .bytes = block.bytes};
    memcpy(pHandle, &handle, sizeof handle);
    return CUDA_SUCCESS;
}

/* ---- the process that opens handles ---- */

bool parking_ipc_knows(const CUipcMemHandle *handle)
{
    uint64_t magic;

    memcpy(&magic, handle, sizeof magic);
    return magic == IPC_MAGIC && parking_applies();
}

/* Connects, and reads the answer. Returns 1 if there was an answer; any other value is a failure,
 * and a negative value is a negative errno. */
static long ask(const struct ipc_handle *handle, uint64_t ends, int fds[PAGES_N_FDS])
{
    struct ipc_request request = {.secret = {handle->secret[0], handle->secret[1]},
                                  .serial = handle->origin.serial};
    struct sockaddr_un address;
    unsigned length = address_of(handle->origin.process, &address);
    int socket = pages_socket(0);
    uint32_t byte;
    long done;

    if (socket < 0)
        return socket;
    ipc_retry(done, socket, ends, os_call(SYS_connect, socket, &address, length));
    if (done == 0)
        ipc_retry(done, socket, ends,
                  os_call(SYS_sendto, socket, &request, sizeof request, MSG_NOSIGNAL, NULL, 0));
    if (done == (long)sizeof request)
        ipc_retry(done, socket, ends, pages_receive(socket, 0, &byte, fds));
    os_close(socket);
    return done;
}

/* Returns a descriptor for the physical allocation, or -1. If the other program has closed the
 * library's socket, the first connection is lost, but makes the library in that program open
 * another socket. */
static int fetch(const struct ipc_handle *handle)
{
    uint64_t ends = os_now() + IPC_ANSWER_NS;
    int fds[PAGES_N_FDS] = {-1, -1};

    for (unsigned i = 0; i < IPC_ATTEMPTS; i++) {
        long done = ask(handle, ends, fds);

        for (unsigned k = done == 1 ? 1 : 0; k < PAGES_N_FDS; k++) {
            if (fds[k] >= 0)
                os_close(fds[k]);
            fds[k] = -1;
        }
        if (done == 1 || done == -EAGAIN)
            break;
        os_sleep(IPC_NAP_NS);
    }
    return fds[0];
}

/* Maps an allocation at newly reserved addresses. */
static CUresult map_import(struct parking_block *block, int fd)
{
    CUmemGenericAllocationHandle handle;
    CUdeviceptr base;
    CUresult result;

    if (driver->cuCtxGetCurrent(&block->ctx) != CUDA_SUCCESS || !block->ctx)
        return CUDA_ERROR_INVALID_CONTEXT;
    result = real->cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd,
                                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result != CUDA_SUCCESS)
        return result;
    block->handle = handle;
    result = driver->cuMemAddressReserve(&base, block->size, 0, 0, 0);
    if (result == CUDA_SUCCESS) {
        block->base = base;
        result = parking_map_handle(block, handle);
        if (result == CUDA_SUCCESS) {
            if (parking_table_add(block))
                return CUDA_SUCCESS;
            real->cuMemUnmap(base, block->size);
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
        driver->cuMemAddressFree(base, block->size);
    }
    real->cuMemRelease(handle);
    return result;
}

static CUresult open_new(uint64_t *addressp, const struct ipc_handle *handle)
{
    struct parking_block block = {.size = handle->size,
                                  .bytes = handle->bytes,
                                  .owner = contexts_owner(),
                                  .fixed = true,
                                  .origin = handle->origin,
                                  .n_opened = 1};
    CUresult result = CUDA_ERROR_MAP_FAILED;
    int fd = fetch(handle);

    if (fd < 0)
        return result;
    result = map_import(&block, fd);
    os_close(fd);
    *addressp = block.base;
    return result;
}

/* Opening a handle again returns the same address, as with the driver. Threads therefore open
 * handles one at a time. */
CUresult parking_ipc_open(CUdeviceptr *addressp, const CUipcMemHandle *given, unsigned int flags)
{
    struct ipc_handle handle;
    uint64_t address = 0;
    CUresult result = CUDA_SUCCESS;

    memcpy(&handle, given, sizeof handle);
    if (!addressp || flags != IPC_PEER_ACCESS)
        return CUDA_ERROR_INVALID_VALUE;
    if (!handle.origin.process)
        return CUDA_ERROR_INVALID_HANDLE;
    if (handle.origin.process == own.process || pages_index_current() != 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    parking_enter(PARKING_MEMORY);
    parking_reap(false);
    os_lock(&open_lock);
    if (!parking_use(&handle.origin, &address))
        result = open_new(&address, &handle);
    os_unlock(&open_lock);
    parking_leave();
    if (result == CUDA_SUCCESS)
        *addressp = address;
    return result;
}

bool parking_ipc_close(CUdeviceptr address, CUresult *resultp)
{
    bool ours;

    if (!parking_applies())
        return false;
    parking_enter(PARKING_STILL);
    ours = parking_close_import(address, resultp);
    parking_leave();
    return ours;
}

/* ---- the end ---- */

/* The driver's destructors, which run after this one, must not run while the thread is in one of
 * the driver's functions. */
__attribute__((destructor)) static void ipc_finish(void)
{
    uint64_t ends = os_now() + IPC_END_NS;
    bool locked;

    while (!(locked = os_trylock(&serve_lock)) && os_now() < ends)
        os_sleep(20 * NS_PER_US);
    ending = true;
    if (locked)
        os_unlock(&serve_lock);
}

/* The handles are the parent's. The child closes its copy of the socket, so that no process waits
 * there for an answer after the parent has ended. */
void parking_ipc_after_fork(void)
{
    if (pages_is_ours(own.listener, own.inode))
        os_close(own.listener);
    own.listener = -1;
    own_lock.word = open_lock.word = serve_lock.word = 0;
    own.process = 0;
    serves = 0;
    ending = false;
}
