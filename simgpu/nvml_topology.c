/*
 * NVML: the location of a GPU in the machine, and the other ends of its NVLinks
 *
 * Both were chosen when the device was created. Every device has a PCI address. If a device has no
 * location, or no links, calls that query them return NVML_ERROR_NOT_SUPPORTED.
 */
#include "nvml_observer.h"

#include <stdio.h>
#include <string.h>

#define SWITCHES   4    /* number of NVSwitches in an HGX H200 */
#define SWITCH_BUS 0xc0 /* above the buses of all GPUs */

static nvmlPciInfo_t pci_info(unsigned int bus)
{
    nvmlPciInfo_t info = {.bus = bus & 0xff};

    snprintf(info.legacy_bus_id, sizeof(info.legacy_bus_id), "0000:%02X:00.0", info.bus);
    snprintf(info.bus_id, sizeof(info.bus_id), "00000000:%02X:00.0", info.bus);
    return info;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetPciInfo_v3, nvmlDevice_t device, nvmlPciInfo_t *info)
{
    nvmlReturn_t r = ready_device(device, info);

    if (r)
        return r;
    *info = pci_info(device->gpu->config.pci_bus);
    return NVML_SUCCESS;
}

/* The first component in which two locations differ determines the level: GPUs on different NUMA
 * nodes share only the system. */
ENTRY(nvmlReturn_t, nvmlDeviceGetTopologyCommonAncestor, nvmlDevice_t one, nvmlDevice_t other,
      int *level)
{
    static const int levels[] = {TOPOLOGY_SYSTEM, TOPOLOGY_NODE, TOPOLOGY_HOSTBRIDGE,
                                 TOPOLOGY_MULTIPLE, TOPOLOGY_SINGLE};
    nvmlReturn_t r = ready_device(one, level);
    size_t same = 0;

    if (!r)
        r = ready_device(other, level);
    if (r)
        return r;
    if (!one->gpu->config.place[0] || !other->gpu->config.place[0])
        return NVML_ERROR_NOT_SUPPORTED;
    while (same < 4 && one->gpu->config.place[same] == other->gpu->config.place[same])
        same++;
    *level = levels[same];
    return NVML_SUCCESS;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetMemoryAffinity, nvmlDevice_t device, unsigned int n,
      unsigned long *nodes, int scope)
{
    nvmlReturn_t r = ready_device(device, nodes);
    unsigned int node;

    if (r)
        return r;
    if (!n || scope < 0 || scope > 1) /* scope: the node or the socket, which are the same here */
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!device->gpu->config.place[0])
        return NVML_ERROR_NOT_SUPPORTED;
    memset(nodes, 0, n * sizeof(*nodes));
    node = device->gpu->config.place[0] - 1;
    if (node / (8 * sizeof(*nodes)) < n)
        nodes[node / (8 * sizeof(*nodes))] = 1ul << node % (8 * sizeof(*nodes));
    return NVML_SUCCESS;
}

/* Only a GPU whose memory is a NUMA node, as in Grace Hopper, has this id. */
ENTRY(nvmlReturn_t, nvmlDeviceGetNumaNodeId, nvmlDevice_t device, unsigned int *node)
{
    nvmlReturn_t r = ready_device(device, node);

    return r ? r : NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t link_end(nvmlDevice_t device, unsigned int link, const void *result,
                             uint8_t *endp)
{
    nvmlReturn_t r = ready_device(device, result);
    bool any = false;

    if (r)
        return r;
    for (unsigned int i = 0; i < GPU_NVLINKS; i++)
        any |= device->gpu->config.nvlinks[i] != GPU_LINK_NONE;
    if (!any)
        return NVML_ERROR_NOT_SUPPORTED;
    if (link >= GPU_NVLINKS)
        return NVML_ERROR_INVALID_ARGUMENT;
    *endp = device->gpu->config.nvlinks[link];
    return NVML_SUCCESS;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetNvLinkState, nvmlDevice_t device, unsigned int link, int *active)
{
    uint8_t end;
    nvmlReturn_t r = link_end(device, link, active, &end);

    if (!r)
        *active = end != GPU_LINK_NONE;
    return r;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetNvLinkRemoteDeviceType, nvmlDevice_t device, unsigned int link,
      int *type)
{
    uint8_t end;
    nvmlReturn_t r = link_end(device, link, type, &end);

    if (r)
        return r;
    if (end == GPU_LINK_NONE)
        return NVML_ERROR_NOT_SUPPORTED;
    *type = end == GPU_LINK_SWITCH   ? LINK_TO_SWITCH
            : end == GPU_LINK_UNSEEN ? LINK_TO_UNKNOWN
                                     : LINK_TO_GPU;
    return NVML_SUCCESS;
}

ENTRY(nvmlReturn_t, nvmlDeviceGetNvLinkRemotePciInfo_v2, nvmlDevice_t device, unsigned int link,
      nvmlPciInfo_t *info)
{
    uint8_t end;
    nvmlReturn_t r = link_end(device, link, info, &end);

    if (r)
        return r;
    if (end == GPU_LINK_NONE)
        return NVML_ERROR_NOT_SUPPORTED;
    if (end == GPU_LINK_UNSEEN) {
        *info = (nvmlPciInfo_t){.domain = ~0u, .bus = ~0u, .device = ~0u};
        strcpy(info->bus_id, "FFFFFFF:FFFF:FF");
    } else if (end == GPU_LINK_SWITCH) {
        *info = pci_info(SWITCH_BUS + link % SWITCHES);
    } else {
        *info = pci_info(end); /* simgpu.py assigns bus n + 1 to GPU n */
    }
    return NVML_SUCCESS;
}
