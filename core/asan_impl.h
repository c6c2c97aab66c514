// asan_impl - whether the address sanitizer is built in; not installed.
#ifndef RILLE_CORE_ASAN_IMPL_H
#define RILLE_CORE_ASAN_IMPL_H

#if defined(__SANITIZE_ADDRESS__) // gcc
#define HAS_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) // clang
#define HAS_ASAN 1
#endif
#endif
#ifndef HAS_ASAN
#define HAS_ASAN 0
#endif

#endif
