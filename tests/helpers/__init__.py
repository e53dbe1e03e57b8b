"""Programs and makers shared by the tests."""
