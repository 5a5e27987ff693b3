/* A library with a destructor that makes one last call, after the destructors of all libraries that
 * were loaded before it. */
#include <unistd.h>

void at_the_end(int (*function)(void));

static int (*last)(void);

void at_the_end(int (*function)(void))
{
    last = function;
}

__attribute__((destructor)) static void call_last(void)
{
    if (last)
        _exit(last() ? 41 : 40);
}
