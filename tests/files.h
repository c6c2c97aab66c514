// files - a folder of its own for a test that writes, and how to look into it.
#ifndef RILLE_TESTS_FILES_H
#define RILLE_TESTS_FILES_H

#include <stdbool.h>
#include <stddef.h>

typedef struct TestFolder {
  char path[256];
  int n_open; // descriptors of the process when the test began
} TestFolder;

// Makes an empty folder; the test fails if it cannot.
void test_folder_make(TestFolder *folder);

// <folder>/<name>, valid until the 8th next call.
const char *test_path(const TestFolder *folder, const char *name);

// Puts a file there, and reads one (malloc'ed, with a final NUL; size may be NULL).
void test_file_put(const TestFolder *folder, const char *name, const void *data, size_t size);
char *test_file_get(const TestFolder *folder, const char *name, size_t *size);

// Files in the folder.
int test_folder_count(const TestFolder *folder);

// Removes it with its files; asserts that no descriptor was left open.
void test_folder_remove(TestFolder *folder);

// True if the latest failure's message has this part; prints the message if not.
bool test_message_has(const char *part);

#endif
