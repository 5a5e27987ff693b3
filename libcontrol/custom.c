/* Start, look-up and streams: functions of the table that are written by hand. */
#include "control.h"

CONTROL_EXPORT CUresult cuInit(unsigned int Flags)
{
    CUresult result;

    if (!pages_start())
        return CUDA_ERROR_SYSTEM_NOT_READY;
    result = real->cuInit(Flags);
    if (result == CUDA_SUCCESS)
        pages_match_devices();
    return result;
}

static void lookup_replace(void **pfn)
{
    struct ledger_slot *slot;
    void *ours;

    if (!pfn || !*pfn)
        return;
    ours = origin_replace(*pfn);
    if (ours == *pfn)
        return;
    *pfn = ours;
    slot = pages_slot();
    if (slot)
        atomic_add_relaxed(&slot->lookups, 1);
}

CONTROL_EXPORT CUresult cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion,
                                         cuuint64_t flags)
{
    CUresult result = real->cuGetProcAddress(symbol, pfn, cudaVersion, flags);

    if (result == CUDA_SUCCESS)
        lookup_replace(pfn);
    return result;
}

CONTROL_EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion,
                                            cuuint64_t flags,
                                            CUdriverProcAddressQueryResult *symbolStatus)
{
    CUresult result = real->cuGetProcAddress_v2(symbol, pfn, cudaVersion, flags, symbolStatus);

    if (result == CUDA_SUCCESS)
        lookup_replace(pfn);
    return result;
}

CONTROL_EXPORT CUresult cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
    gate_note_dependency();
    return real->cuStreamWaitEvent(hStream, hEvent, Flags);
}

CONTROL_EXPORT CUresult cuStreamWaitEvent_ptsz(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
    gate_note_dependency();
    return real->cuStreamWaitEvent_ptsz(hStream, hEvent, Flags);
}

CONTROL_EXPORT CUresult cuStreamDestroy_v2(CUstream hStream)
{
    gate_forget_stream(hStream);
    return real->cuStreamDestroy_v2(hStream);
}
