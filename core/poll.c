// poll - storage of the hook.
#include "core/poll.h"

void (*poll_hook)(void) = 0;
