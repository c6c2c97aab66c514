// signals - Ctrl-C at the prompt.
#ifndef RILLE_LUA_SIGNALS_H
#define RILLE_LUA_SIGNALS_H

#include "lua/binding.h"

#ifdef __cplusplus
extern "C" {
#endif

// Between the two, Ctrl-C raises the error "interrupted" in what Lua runs.
void interrupts_begin(Rille *r);
void interrupts_end(Rille *r);

#ifdef __cplusplus
}
#endif
#endif
